"""A channel belongs to one thread."""

import contextlib
import threading
import time

import numpy as np
import pytest

from skirl.peers.base import PeerError
from tests.threads_as_trainers import InProcess


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
