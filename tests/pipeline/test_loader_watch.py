"""A watched loader: interrupted when it hangs, never when it came back in time."""

import math
import signal
import threading
import time

import pytest

from skirl.pipeline.loader_watch import StageStuck, Watch
from skirl.tools.interrupts import uninterrupted
from tests.loops import our_threads, wait_for


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    wait_for(lambda: not our_threads(), 5)


def test_reads_within_patience_are_left_alone():
    watch = Watch(0.3)
    for number in range(4):
        with uninterrupted() as hold, watch.reading(hold, number):
            time.sleep(0.1)
    time.sleep(0.5)  # and nothing happens between reads
    watch.close()


def test_a_signal_that_comes_too_late_is_still_ours():
    """The loader comes back just when the watcher has sent its signal: that must not look like a Ctrl-C later on."""
    watch = Watch(60)
    with pytest.raises(StageStuck), uninterrupted() as hold, watch.reading(hold, 7):
        hold.resume()
        watch._fired = True
        threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    watch.close()
    time.sleep(0.2)


def test_the_users_interrupt_is_not_taken_for_ours():
    watch = Watch(60)
    with pytest.raises(KeyboardInterrupt), uninterrupted() as hold, watch.reading(hold, 0):
        signal.raise_signal(signal.SIGINT)
    watch.close()


def test_patience_without_end_needs_no_thread():
    watch = Watch(math.inf)
    with uninterrupted() as hold, watch.reading(hold, 0):
        assert not our_threads()
    watch.close()


def test_it_can_be_used_again_after_close():
    watch = Watch(0.2)
    for _ in range(2):
        with pytest.raises(StageStuck), uninterrupted() as hold, watch.reading(hold, 0):
            time.sleep(10)
        watch.close()
        assert not our_threads()


def test_abandoned_its_thread_ends():
    watch = Watch(0.4)
    with uninterrupted() as hold, watch.reading(hold, 0):
        assert our_threads() == ["skirl-watch"]
    watch.abandon()
