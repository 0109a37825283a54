"""A run as one of several trainers: which part is its own, and how all trainers' numbers are put together."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from skirl.checkpoint.keeper import Asked
from skirl.checkpoint.votes import Votes
from skirl.data.share import block
from skirl.engine.device import torch_device
from skirl.peers.base import Peers, pack, unpack
from skirl.peers.job import trainers
from skirl.tools.machine import peak_bytes

if TYPE_CHECKING:
    from skirl.data.source import Source
    from skirl.pipeline.lookahead import Lookahead
    from skirl.train.flags import LogFlags
    from skirl.train.loop import Done
    from skirl.train.meter import Meter
    from skirl.train.recipe import Recipe

T = TypeVar("T")
NOT_ASKED = Asked()
OF_LOOP = ("rows", "dense", "lookups")
"""Channels on which the training loop itself waits for other trainers."""


class TrainerShare:
    """One trainer's share of a run.

    >>> from skirl.peers.base import Alone
    >>> share = TrainerShare(Alone())
    >>> share.alone, share.first, share.total({"fetched": 3})
    (True, True, {'fetched': 3})
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.rank, self.size = peers.rank, peers.size

    @classmethod
    def of_job(cls, device: str = "cpu", patience: float | None = None) -> "TrainerShare":
        """Return this process's share. device: where its rows are. patience: seconds to wait for other trainers."""
        return cls(trainers(str(torch_device(device)), patience))

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def first(self) -> bool:
        """True if this is the trainer that shows and writes the results of the run."""
        return self.rank == 0

    def recipe(self, recipe: "Recipe") -> "Recipe":
        """Return the recipe with at least as many shards as trainers, a power of two. Raise if it sets too few."""
        shards = 1 << (self.size - 1).bit_length()
        if recipe.step.shards >= shards:
            return recipe
        if recipe.step.shards > 1:
            raise ValueError(
                f"{self.size} trainers share shards={recipe.step.shards}: set shards to {shards} or more, a power of two"
            )
        return replace(recipe, step=replace(recipe.step, shards=shards))

    def logged(self, log: "LogFlags") -> "LogFlags":
        """Return the flags for this trainer: the first one writes everything, the others nothing."""
        return log if self.first else replace(log, run="none", trace=None)

    def told(self, mine: Any, tag: str) -> list[Any]:
        """Exchange values between all trainers and return them by rank. Call it between two steps."""
        return self.peers.channel("lookups").told(mine, tag)

    def of_first(self, work: Callable[[], T], tag: str) -> T:
        """Do work on the first trainer and return its result on all. An error of it is raised on all."""
        if self.alone:
            return work()
        votes = Votes(self.peers)
        return votes.told(votes.agreed(lambda: work() if self.first else None, tag), tag)[0]

    def of(self, stream: "Source", shards: int) -> "Source":
        """Return the stream of this trainer's shards of every batch."""
        return stream.sharded(*block(self.rank, self.size, shards), shards)

    def exchange(self, arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Send arrays to all trainers and return each one's, by rank. Call it between two steps."""
        come = self.peers.channel("lookups").exchange([pack(*arrays)] * self.size, "numbers of a run")
        return [unpack(part) for part in come]

    def whole(self, done: "Done", asked: Asked = NOT_ASKED) -> "tuple[Done, Asked | None]":
        """Combine a step over all trainers: the losses of all shards, in order, and their mean, as in one process.

        Logits and labels, nearly all of the bytes, go to the first trainer only, which keeps the metrics.

        asked: what this trainer is asked to do after the step. The second value is what all must do: stop if one of them is
        asked to, save if the first is. It is None if there is only one trainer.
        """
        import torch

        if self.alone:
            return done, None
        losses, *large = (t.detach().cpu().numpy().reshape(-1) for t in (done.losses, done.logits, done.labels))
        said = np.array([*asked, np.isfinite(large[0]).all(), done.samples], np.int64)
        to_first, to_others = pack(losses, said, *large), pack(losses, said, *(part[:0] for part in large))
        come = self.peers.channel("lookups").exchange(
            [to_others if rank else to_first for rank in range(self.size)], "numbers of a step"
        )
        parts = zip(*map(unpack, come), strict=True)
        losses, told, logits, labels = (torch.from_numpy(np.concatenate(of_ranks)) for of_ranks in parts)
        stop, save, finite, samples = told.view(self.size, 4).unbind(1)
        of_all = replace(
            done, loss_tensor=losses.mean(), losses=losses, logits=logits, labels=labels, samples=int(samples.sum()),
            finite=bool(finite.all()),
        )  # fmt: skip
        return of_all, Asked(stop=bool(stop.any()), save=bool(save[0]))

    def total(self, counts: dict[str, Any]) -> dict[str, Any]:
        """Return the counts with each whole number summed over all trainers."""
        if self.alone:
            return counts
        names = [name for name, count in counts.items() if isinstance(count, int)]
        come = self.exchange([np.array([counts[name] for name in names], np.int64)])
        sums = np.sum([part for (part,) in come], axis=0).tolist()
        return counts | dict(zip(names, sums, strict=True))


def gathered(batches: "Lookahead", meter: "Meter", share: TrainerShare) -> dict[str, Any] | None:
    """Return the result's `by_trainer`; None if there is one trainer. All trainers call this at once, between two steps."""
    if share.alone:
        return None
    engine, times, counted = batches.engine, batches.times, share.peers.counted()
    lane = {
        "touched": len(engine.seen),
        "cache": sum(len(cache) for cache in engine.caches),
        **{name: count for name, count in asdict(engine.counters).items() if name != "steps"},
        "seconds": meter.seconds,
        "stall": times.stall,
        "read": times.read,
        "waited": sum(counted[name]["seconds"] for name in OF_LOOP if name in counted),
        "busy": dict(times.busy),
        "sent": sum(sum(of["bytes_sent"]) for of in counted.values()),
        "peak_bytes": peak_bytes(),
    }
    return {"lanes": share.told(lane, "what each trainer did")}
