"""A watched loader: left alone however long it takes, reported while it hangs, and an error once it comes back too late."""

import os
import signal
import threading
import time

import pytest

from skirl.pipeline.reader import Watch
from skirl.pipeline.stages import StageStuck
from skirl.tools.interrupts import uninterrupted
from tests.loops import our_threads, wait_for


def test_reads_within_patience_are_left_alone(caplog):
    watch = Watch(0.3)
    for number in range(4):
        with uninterrupted() as hold, watch.reading(hold, number):
            time.sleep(0.1)
    time.sleep(0.5)  # and nothing happens between reads
    watch.close()
    assert not caplog.records


def hangs_here(go):
    go.wait(30)


def test_a_hanging_loader_is_told_of_while_it_hangs(capfd, caplog):
    """Once after the patience, and again after twice that time; nothing is raised inside the loader."""
    watch, go = Watch(0.2), threading.Event()
    sentence = r"the loader took \d\.\d s for batch 7, and patience is 0.2 s: fix the loader, or raise"
    with pytest.raises(StageStuck, match=sentence), uninterrupted() as hold, watch.reading(hold, 7):
        threading.Thread(target=lambda: (wait_for(lambda: len(caplog.records) >= 2), go.set())).start()
        hangs_here(go)
        came_back = True
    watch.close()
    assert came_back
    stacks = capfd.readouterr().err
    assert stacks.count("in hangs_here") >= 2 and "skirl-watch" not in caplog.text
    first = caplog.records[0].message
    assert "the loader has been at batch 7 for 0." in first and f"`kill {os.getpid()}`" in first


def test_a_step_of_the_loader_that_came_late_is_an_error(caplog):
    """Within a single read, as in the first pass of an epoch. The error names the late batch."""
    watch = Watch(0.2)
    with pytest.raises(StageStuck, match="for batch 1,"), uninterrupted() as hold, watch.reading(hold, 0):
        watch.moved(1)
        time.sleep(0.3)
        watch.moved(2)
        pytest.fail("not reached")
    watch.close()


@pytest.mark.parametrize("wait", [0.0, 0.3])
def test_ctrl_c_ends_a_loader_at_once(wait):
    """Whether it has hung for longer than the patience or not."""
    watch = Watch(0.1)
    with pytest.raises(KeyboardInterrupt), uninterrupted() as hold, watch.reading(hold, 0):
        timer = threading.Timer(wait, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        timer.start()
        time.sleep(30)
    timer.join()
    watch.close()


def test_abandoned_its_thread_ends():
    watch = Watch(0.4)
    with uninterrupted() as hold, watch.reading(hold, 0):
        assert our_threads() == ["skirl-watch"]
    watch.abandon()
