"""A speed without what was paused, and without the first step."""

import time

import pytest

from skirl.tools.speed import Speed


def test_pauses_and_the_first_step_do_not_count(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    speed = Speed()
    now[0] += 5.0  # the first step compiles
    speed.reached(50)
    now[0] += 2.0
    with speed.paused():
        now[0] += 40.0
    speed.reached(150)
    assert (speed.seconds, speed.rate(150)) == (7.0, 50.0)
