"""Ctrl-C held back, let through, and passed on to the previous handler."""

import signal
import threading
import time

import pytest

from skirl.tools import interrupts
from skirl.tools.interrupts import Hold


def press():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handler_is_put_back():
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_innermost_hands_it_to_the_outermost():
    reached = []
    with pytest.raises(KeyboardInterrupt), Hold():
        with Hold():
            press()
        reached.append("between")
    assert reached


def test_the_most_is_let_through_inside_the_block():
    reached = []
    with pytest.raises(KeyboardInterrupt), Hold() as hold:
        hold.most = 2
        press()
        reached.append(1)
        press()
        reached.append(2)
    assert reached == [1]


def test_an_ignored_interrupt_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Hold() as hold:
            press()
            hold.check()
            press()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_hold_nothing():
    active = []

    def body():
        with Hold() as hold:
            active.append(hold.active)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert active == [False]


def test_released_code_is_interrupted_and_then_left_in_peace(monkeypatch):
    monkeypatch.setattr(interrupts, "QUIET", 0.1)
    seen = []
    with pytest.raises(KeyboardInterrupt), Hold() as hold, hold.released():
        try:
            press()
        except KeyboardInterrupt:
            seen.append("first")
        press()  # at once: the exit from the block must not be interrupted
        seen.append("held")
        time.sleep(0.15)
        try:
            press()  # the code swallowed the first one
        except KeyboardInterrupt:
            seen.append("second")
    assert seen == ["first", "held", "second"]


def test_an_interrupt_before_the_release_is_raised_there():
    with pytest.raises(KeyboardInterrupt), Hold() as hold:
        press()
        with hold.released():
            pytest.fail("not reached")


@pytest.mark.parametrize("lent", [False, True])
def test_one_that_comes_while_the_block_is_left_is_raised_behind_it(lent, monkeypatch):
    install = interrupts.install

    def pressed(number, handler):
        if handler is signal.default_int_handler:
            press()
        return install(number, handler)

    with pytest.raises(KeyboardInterrupt), Hold() as hold:
        if lent:
            released = hold.released()
            released.__enter__()
        hold.most = 1
        monkeypatch.setattr(interrupts, "install", pressed)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_released_code_sets_is_kept():
    calls = []

    def mine(number, frame):
        calls.append(number)

    try:
        with Hold() as hold:
            with hold.released():
                signal.signal(signal.SIGINT, mine)
            press()
            assert not calls
        assert calls == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
