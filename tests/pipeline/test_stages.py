"""Stages: all learn of a failure in one of them, slow is not stuck, and a stuck one is named."""

import logging
import threading
import time
import traceback

import pytest

from skirl.pipeline import stages as module
from skirl.pipeline.loader_watch import StageStuck
from skirl.pipeline.stages import Stages, Times
from skirl.tools.interrupts import uninterrupted
from tests.loops import Broken, our_threads, wait_for

NAMES = ("plan", "fetch", "write")


def make(patience=60.0):
    return Stages(NAMES, patience=patience, hook=None, times=Times())


def start(stages, **jobs):
    """Start these jobs, and idle ones for the other stages."""

    def idle(name):
        with stages.lock:
            stages.pause(name, lambda: stages.stopping)

    stages.start({name: jobs.get(name, lambda n=name: idle(n)) for name in NAMES})


def wait(stages, until=lambda: False, what="rows"):
    with uninterrupted() as hold:
        stages.wait(hold, until, what)


def end(stages):
    stages.close()
    with uninterrupted() as hold:
        assert stages.join(hold) == []


def test_a_failure_reaches_the_loop_and_stops_the_others():
    def fail():
        raise Broken("in fetch")

    stages = make()
    start(stages, fetch=fail)
    with pytest.raises(Broken) as caught:
        wait(stages)
    assert "in fail" in "".join(traceback.format_tb(caught.tb))
    wait_for(lambda: not our_threads())
    with pytest.raises(Broken):
        stages.check()


def test_no_progress_is_stuck_and_names_the_stage():
    stages, go = make(patience=0.3), threading.Event()

    def busy():
        with stages.working("write", 5):
            go.wait(20)

    start(stages, write=busy)

    with pytest.raises(
        StageStuck, match=r"no stage made progress for 0\.\d s .* rows: the write stage is at step 5 for 0"
    ):
        wait(stages)
    go.set()
    end(stages)


def test_progress_of_any_stage_is_not_stuck():
    stages, ended = make(patience=0.3), []

    def work():
        for number in range(6):
            with stages.working("plan", number):
                time.sleep(0.1)
        ended.append(1)

    start(stages, plan=work)
    wait(stages, lambda: ended)
    end(stages)


def test_closing_waits_for_one_that_makes_progress(caplog, monkeypatch):
    monkeypatch.setattr(module, "SLICE", 0.02)
    stages = make(patience=0.5)

    def work():
        for number in range(12):
            with stages.working("write", number):
                time.sleep(0.2)

    start(stages, write=work)
    with caplog.at_level(logging.WARNING):
        end(stages)
    assert "closing: the write stage is at step" in caplog.text


def test_closing_gives_up_the_stuck_one_after_the_others_ended():
    stages, go, ended = make(patience=0.5), threading.Event(), []

    def write():
        for number in range(30):
            with stages.working("write", number):
                time.sleep(0.02)
        ended.append(1)

    start(stages, fetch=lambda: go.wait(20), write=write)
    stages.close()
    with uninterrupted() as hold:
        assert stages.join(hold) == ["fetch"]
    assert ended
    go.set()


def test_a_thread_that_cannot_start_takes_the_others_down(monkeypatch):
    begin = threading.Thread.start

    def only_two(thread):
        if thread.name == "skirl-write":
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", only_two)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start(make())
