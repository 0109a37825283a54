"""Stages: all learn of a failure in one of them, slow is not stuck, and a stuck one is named."""

import threading

import pytest

from skirl.pipeline.stages import Stages, Times
from skirl.tools.interrupts import uninterrupted

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


def test_a_thread_that_cannot_start_takes_the_others_down(monkeypatch):
    begin = threading.Thread.start

    def only_two(thread):
        if thread.name == "skirl-write":
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", only_two)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start(make())
