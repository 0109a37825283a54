"""The emulated link: a store like any other, whose calls take as long as delay and rate say."""

import numpy as np
import pytest

from skirl.store import MemoryStore, Record, open_store
from skirl.tools.units import Link
from tests.store import links as link_module
from tests.store.links import LinkStore


class Clock:
    """A clock that advances only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += 1


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(link_module, "time", clock)
    return clock


def store_over(link: Link) -> LinkStore:
    return LinkStore(MemoryStore({0: Record(25)}), link)  # 100 bytes per row


def test_a_call_takes_delay_and_bytes(clock):
    store = store_over(Link(rate=1000, delay=0.5))
    keys, rows = np.arange(3), np.zeros((3, 25), np.float32)
    store.write(keys, rows)
    assert clock.now == pytest.approx(100 + 0.5 + 0.3)
    store.read(np.array([0, 1, 7]), rows)  # row 7 is not held, so nothing is sent back for it
    assert clock.now == pytest.approx(100 + 0.5 + 0.3 + 0.5 + 0.2)
    assert (store.sent.nbytes, store.received.nbytes) == (300, 200)
    assert (store.sent.calls, store.received.calls) == (1, 1)
    assert clock.slept == 2, "a wait is one sleep"


def test_calls_at_once_share_the_rate_and_overlap_the_delay(clock):
    store = store_over(Link(rate=1000, delay=0.5))
    for _ in range(4):
        store.sent.wait(100, began=100.0)
    assert clock.now == pytest.approx(100 + 4 * 0.1 + 0.5)


def test_the_directions_do_not_wait_for_each_other(clock):
    store = store_over(Link(rate=1000, delay=0.5))
    store.sent.wait(1000, began=100.0)
    store.received.wait(1000, began=100.0)
    assert clock.now == pytest.approx(100 + 1.5)


def test_a_spec_does_not_name_a_link():
    with pytest.raises(ValueError, match="a list in which 'link:1Gbit' is no store: set each to memory"):
        open_store("link:1Gbit,1us:memory", {0: Record(2)})


@pytest.mark.parametrize("text", ["1Gbit,", "100us,1Gbit", "0bit,1us", "1Gbit,-1us"])
def test_refuses_a_link_that_is_none(text):
    with pytest.raises(ValueError, match="write it RATE,DELAY, such as 1Gbit,100us"):
        Link.parse(text)
