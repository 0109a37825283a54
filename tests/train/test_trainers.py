"""What a run does as one of several trainers: counts of all, the same on each."""

import numpy as np

from skirl.peers.alone import Alone
from skirl.peers.in_process import InProcess
from skirl.train.trainers import Share


def test_what_travelled_is_that_of_all_trainers() -> None:
    def work(peers):
        peers.channel("votes").exchange([np.zeros(100 * (to != peers.rank)) for to in range(3)])
        return Share(peers).network()

    first, *others = InProcess.run(3, work)
    assert all(other == first for other in others)
    # Of each of 6 pairs of ranks a head of 128 bytes and 100 floats.
    assert first["votes"]["bytes"] == 6 * (128 + 800) and first["votes"]["vectors"] == 0
    assert first["rows"]["bytes"] == 0 and first["votes"]["seconds"] > 0


def test_one_trainer_has_no_network() -> None:
    assert Share(Alone()).network() == {}
