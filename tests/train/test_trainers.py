"""What a run does as one of several trainers: counts of all, the same on each."""

import numpy as np
import pytest
import torch

from skirl.data.share import block
from skirl.peers.alone import Alone
from skirl.peers.in_process import InProcess
from skirl.train.done import Done
from skirl.train.meter import Meter
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


def steps_of(first: int, last: int) -> list[Done]:
    """Some of the 4 shards of 5 steps, 6 samples each."""
    drawn = torch.Generator().manual_seed(0)
    found = []
    for _ in range(5):
        logits, labels = torch.randn(4, 6, generator=drawn), torch.randint(0, 2, (4, 6), generator=drawn).float()
        losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)
        mine, size = slice(first, last), 6 * (last - first)
        mean = losses[mine].mean()
        found.append(Done([], logits[mine].reshape(-1), labels[mine].reshape(-1), losses[mine], mean, size))
    return found


def measured(peers) -> tuple[dict, list[int]]:
    """What a trainer's meter counts, but for times, and the bytes that it was sent."""
    share, meter = Share(peers), Meter()
    for done in steps_of(*block(peers.rank, peers.size, 4)):
        of_all, stops = share.whole(done)
        meter.add(of_all.loss_tensor, of_all.logits, of_all.labels, samples=of_all.samples, finite=of_all.finite)
        assert not stops
    result = {name: value for name, value in meter.result().items() if "second" not in name}
    return result, [] if share.alone else peers.channel("lookups").counters.bytes_received


@pytest.mark.parametrize("size", [2, 3])
def test_the_first_trainer_counts_what_one_process_does(size: int) -> None:
    alone, _ = measured(Alone())
    (first, received), *others = InProcess.run(size, measured)
    assert first == alone and alone["auc"] is not None and alone["samples"] == 5 * 4 * 6
    for other, few in others:
        assert other["loss"] == alone["loss"] and other["samples"] == alone["samples"] and other["auc"] is None
        assert max(few) < min(n for n in received if n), "others are sent logits and labels"


def test_all_trainers_hear_of_a_stop_and_of_predictions_that_are_not_finite() -> None:
    def work(peers):
        [done, *_] = steps_of(*block(peers.rank, peers.size, 4))
        if peers.rank == 2:
            done.logits[0] = torch.inf
        of_all, stops = Share(peers).whole(done, stops=peers.rank == 1)
        return of_all.finite, stops, len(of_all.logits)

    assert InProcess.run(3, work) == [(False, True, 24), (False, True, 0), (False, True, 0)]
