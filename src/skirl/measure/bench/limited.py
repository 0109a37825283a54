"""One trainer's part of `skirl bench link`: the same steps with all rows local, and together with other trainers."""

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from skirl.core.batch import Batch
from skirl.core.optim import RowwiseAdagrad
from skirl.data.synthetic import Synthetic
from skirl.measure.bench.helpers import WAYS
from skirl.nn.collection import EmbeddingBagCollection
from skirl.peers.base import Alone, Peers
from skirl.peers.job import trainers, using
from skirl.pipeline.lookahead import lookahead

EDGE = 2
"""Untimed steps at the beginning of a turn, in which data of the previous turn is still on its way."""


@dataclass(frozen=True)
class Job:
    """The work of every trainer.

    **Arguments**

    - `dense`: approximate number of dense weights in the model.
    - `batch`: samples in a step, over all trainers.
    - `dim`: numbers in a row.
    - `rows_scale`: scale of the Criteo Kaggle tables.
    - `read`: the number of different batches, which repeat.
    - `steps`: steps in a turn; the ways take turns.
    - `rounds`: timed turns of each way, after one that is not timed.
    - `delay`: seconds that each message takes on top of its bytes.
    - `seed`: seed of ids and weights.
    """

    dense: int = 400_000
    batch: int = 4096
    dim: int = 64
    rows_scale: float = 0.1
    read: int = 16
    steps: int = 16
    rounds: int = 3
    delay: float = 0.0
    seed: int = 0

    @property
    def source(self) -> Synthetic:
        """The stream of batches."""
        return Synthetic(
            "criteo-kaggle", batch_size=self.batch, batches=self.read, seed=self.seed, rows_scale=self.rows_scale
        )


class TwoLayers(nn.Module):
    """Two dense layers over the rows.

    **Arguments**

    - `embeddings`: give the rows.
    - `width`: numbers in all rows of a sample.
    - `dense`: approximate number of weights in both layers together.
    """

    def __init__(self, embeddings: EmbeddingBagCollection, width: int, dense: int) -> None:
        super().__init__()
        self.embeddings = embeddings
        hidden = max(1, dense // (width + 2))
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the logit of each sample."""
        return self.layers(self.embeddings(batch.sparse).stacked().flatten(1)).squeeze(1)


class Again:
    """A loader that yields the same batches over and over.

    **Arguments**

    - `batches`: the batches, in order.
    """

    yields_fresh = True

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield from self._batches


class Way:
    """One way to train, step by step.

    **Arguments**

    - `job`: the model and the stream.
    - `peers`: the trainers; with `Alone` all rows are local.
    - `parts`: this trainer's shard of each batch.
    - `stack`: closes the lookahead and the rows.
    """

    def __init__(self, job: Job, peers: Peers, parts: Sequence[Batch], stack: ExitStack) -> None:
        self.peers, self._steps = peers, job.steps
        tables = job.source.tables(job.dim)
        rows = min(sum(table.rows for table in tables), 26 * job.batch * job.read)
        with using(peers):
            embeddings = EmbeddingBagCollection(tables, optimizer=RowwiseAdagrad(lr=0.02), cache=rows, seed=job.seed)
        self._exchange = embeddings.engine.exchange
        self.model = TwoLayers(embeddings, len(tables) * job.dim, job.dense)
        draws = torch.Generator().manual_seed(job.seed)
        for weight in self.model.layers.parameters():  # equal on all trainers, even if they are threads
            nn.init.uniform_(weight, -0.05, 0.05, generator=draws)
        stack.callback(embeddings.close)
        self._batches = iter(stack.enter_context(lookahead(Again(parts), self.model, depth=8, shards=peers.size)))
        self.losses: list[float] = []

    def turn(self, way: str = WAYS[0]) -> dict[str, Any]:
        """Train a turn and return its averages per step: time, bytes sent and received, and waits.

        **Arguments**

        - `way`: one of `WAYS`; they do the same when alone.
        """
        if self._exchange is not None:
            self._exchange.all_critical = way == "all_critical"
        for _ in range(EDGE):
            self._trained()
        self._let_move()
        before, used, began = _bytes(self.peers), time.process_time(), time.perf_counter()
        waited = _waited(self.peers)
        for _ in range(self._steps):
            self._trained()
        seconds, cpu = time.perf_counter() - began, time.process_time() - used
        self._let_move()
        after, still = _bytes(self.peers), _waited(self.peers)
        return {
            "seconds": seconds / self._steps,
            "cpu": cpu / self._steps,
            "sent": {name: (after[name][0] - before[name][0]) / self._steps for name in after},
            "received": {name: (after[name][1] - before[name][1]) / self._steps for name in after},
            "waited": {name: (still[name] - waited[name]) / self._steps for name in still},
        }

    def _let_move(self) -> None:
        """Wait for all background transfers, so that the bytes counted belong to exactly these steps."""
        while self._exchange is not None and not self._exchange.moved:
            time.sleep(1e-4)

    def _trained(self) -> None:
        """Train one step."""
        batch = next(self._batches)
        loss = binary_cross_entropy_with_logits(self.model(batch), batch.labels)
        loss.backward()
        self._step()
        self.losses.append(loss.item())

    @torch.no_grad()
    def _step(self) -> None:
        """Apply gradient descent by hand: the hooks on torch's optimizers see those of all threads in the process."""
        for weight in self.model.layers.parameters():
            assert weight.grad is not None
            weight.add_(weight.grad, alpha=-0.01)
            weight.grad = None


def _bytes(peers: Peers) -> dict[str, tuple[int, int]]:
    channels = peers.counted()
    return {name: (sum(c["bytes_sent"]), sum(c["bytes_received"])) for name, c in channels.items() if name != "start"}


def _waited(peers: Peers) -> dict[str, float]:
    return {name: counters["seconds"] for name, counters in peers.counted().items() if name != "start"}


def of_rank(job: Job, peers: Peers, ways: Sequence[str] = WAYS) -> dict[str, Any]:
    """Measure one trainer alone and with the others in each way, taking turns. Return the medians and the losses.

    **Arguments**

    - `job`: the same on all trainers.
    - `peers`: all trainers.
    - `ways`: some of `WAYS`.
    """
    torch.set_num_threads(1)
    parts = list(job.source.sharded(peers.rank, peers.rank + 1, peers.size))
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in ("local", *ways)}
    with ExitStack() as stack:
        local, together = Way(job, Alone(), parts, stack), Way(job, peers, parts, stack)
        for _ in range(1 + job.rounds):
            for name, of in turns.items():
                peers.channel("start").exchange([np.zeros(0, np.uint8)] * peers.size, f"before {name}")
                of.append(local.turn() if name == "local" else together.turn(name))
    middles = {name: _middle(of[1:]) for name, of in turns.items()}
    return {"rank": peers.rank, **middles, "losses": together.losses}


def _middle(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure over the turns."""
    return {
        name: {of: statistics.median(turn[name][of] for turn in turns) for of in first}
        if isinstance(first, dict)
        else statistics.median(turn[name] for turn in turns)
        for name, first in turns[0].items()
    }


def delayed(peers: Peers, seconds: float) -> None:
    """Delay each message on all channels, as a longer cable would.

    **Arguments**

    - `peers`: the trainers whose channels to delay.
    - `seconds`: the delay.
    """
    for channel in peers.channels.values():
        move = channel._move
        channel._move = lambda outs, parts, doing, move=move: _Later(move(outs, parts, doing), seconds)


class _Later:
    """A transfer that is done no earlier than after a delay."""

    def __init__(self, work: Any, seconds: float) -> None:
        self._work, self._due = work, time.perf_counter() + seconds

    def wait(self) -> None:
        self._work.wait()
        while (left := self._due - time.perf_counter()) > 0:
            time.sleep(left)


if __name__ == "__main__":
    jobs = [Job(**given) for given in json.loads(sys.argv[1])]
    mine = trainers()
    if jobs[0].delay:
        delayed(mine, jobs[0].delay)
    print(json.dumps([of_rank(job, mine, sys.argv[2].split(",")) for job in jobs]))
