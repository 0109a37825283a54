"""Threads: errors and interrupts come after all parts have ended, and forks work."""

import os
import threading
import time
import traceback

import numpy as np
import pytest

from skirl.tools import threads
from skirl.tools.threads import run


def test_an_error_surfaces_with_its_traceback_after_all_parts_ended():
    ended = []

    def fail_in_the_second_half(lo, hi):
        if lo > 0:
            raise RuntimeError("broken part")
        time.sleep(0.05)
        ended.append(lo)

    with pytest.raises(RuntimeError, match="broken part") as caught:
        run(fail_in_the_second_half, 2, threads=2)
    assert ended == [0]
    assert "fail_in_the_second_half" in "".join(traceback.format_tb(caught.tb))
    visits = np.zeros(4)
    run(lambda lo, hi: visits[lo:hi].fill(1), 4, threads=2)  # the thread has survived
    assert (visits == 1).all()


def test_ctrl_c_waits_for_the_parts():
    ended = []

    def interrupt(lo, hi):
        if lo == 0:
            raise KeyboardInterrupt
        time.sleep(0.05)
        ended.append(lo)

    with pytest.raises(KeyboardInterrupt):
        run(interrupt, 2, threads=2)
    assert ended == [1]


def test_many_callers_at_once():
    totals = [np.zeros(1000) for _ in range(8)]

    def add(x, lo, hi):
        x[lo:hi] += 1

    def call(x):
        for _ in range(50):
            run(add, 1000, x, threads=3)

    callers = [threading.Thread(target=call, args=(x,)) for x in totals]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((x == 50).all() for x in totals)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_makes_its_own_threads():
    run(lambda lo, hi: None, 4, threads=4)
    with threads._threads.lock:  # as if another thread held it at the moment of the fork
        pid = os.fork()
        if pid == 0:
            visits = np.zeros(8)
            run(lambda lo, hi: visits[lo:hi].fill(1), 8, threads=4)
            os._exit(0 if (visits == 1).all() else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
