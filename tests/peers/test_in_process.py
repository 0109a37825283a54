"""Channels between threads: what arrives is what was sent, whatever the delays, and one that fails or hangs ends all."""

import contextlib
import random
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.peers.base import PeerError
from tests.cases import cases
from tests.peers.talk import expected, talk
from tests.threads_as_trainers import InProcess


@cases(12)
@given(st.integers(1, 5), st.integers(0, 10**6))
def test_what_comes_is_what_was_sent(size, seed):
    shake = random.Random(seed)
    shaken = lambda rank, doing: time.sleep(shake.random() / 2e3)  # noqa: E731
    found = InProcess.run(size, lambda peers: talk(peers, seed), hook=shaken)
    assert found == [expected(rank, size, seed) for rank in range(size)]


def test_a_channel_has_one_thread():
    peers, _ = InProcess.job(2)
    ids = peers.channel("ids")

    def wait():
        with contextlib.suppress(PeerError):
            ids.exchange([np.zeros(1, np.uint8)] * 2)

    threading.Thread(target=wait, daemon=True).start()
    while not ids.counters.calls:
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="two threads talk over channel ids at once"):
        ids.exchange([np.zeros(1, np.uint8)] * 2)
    peers.fail("the test is over")
