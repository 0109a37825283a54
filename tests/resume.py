"""A small training run that can be saved, loaded and compared bit by bit."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import skirl
from skirl.checkpoint.import_rows import opened
from skirl.core.optim import RowOptimizer
from skirl.data import Synthetic
from skirl.nn.collection import collections_of
from skirl.tools import rng_state
from tests.streams import stored_rows

DENSE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW([{"params": list(p), "weight_decay": 0.1}], lr=0.01),
}
ROWS: list[RowOptimizer] = [
    skirl.SGD(lr=0.1),
    skirl.Adagrad(lr=0.1, lr_decay=0.01, initial_accumulator_value=0.5),
    skirl.RowwiseAdagrad(lr=0.1, weight_decay=0.01, clip=0.5),
    skirl.Adam(lr=0.02),
]


@dataclass(frozen=True)
class Setup:
    rows: RowOptimizer = ROWS[3]
    dense: str = "adam"
    loader: str = "synthetic"
    """synthetic: has a state_dict; list: has none; shuffled: a DataLoader that draws its order from torch; turning:
    `Turning`."""
    batches: int = 8
    passes: int = 2
    accumulate: int = 1
    depth: Any = "auto"
    prefetch: int = 2
    cache: Any = 120
    seed: int = 0
    store: str = "memory"
    resume: bool = False
    """Whether the store may already hold rows."""
    early: bool = False
    """Save at the top of the loop, before training on the batch."""

    @property
    def data(self) -> Synthetic:
        return Synthetic("tiny", batch_size=8, batches=self.batches, seed=self.seed, rows_scale=0.01, pooling_factor=2)

    @property
    def steps(self) -> int:
        return self.passes * -(-self.batches // self.accumulate)

    def make_loader(self) -> Iterable[skirl.Batch]:
        if self.loader == "synthetic":
            return self.data
        batches = list(self.data)
        if self.loader == "list":
            return batches
        if self.loader == "turning":
            return Turning(batches)
        return torch.utils.data.DataLoader(batches, batch_size=None, shuffle=True)  # type: ignore[arg-type]


class Turning:
    """A loader with a different order in each pass, whose state_dict hands out its live state and loads without a copy."""

    def __init__(self, batches: list[skirl.Batch]) -> None:
        self.batches = batches
        self.state = {"pass": 0, "next": 0}

    def __iter__(self) -> Iterator[skirl.Batch]:
        while self.state["next"] < len(self.batches):
            place = self.state["next"] + self.state["pass"]
            self.state["next"] += 1
            yield self.batches[place % len(self.batches)]
        self.state["next"] = 0
        self.state["pass"] += 1

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


class Net(nn.Module):
    """Two banks, dropout, and a batch norm for its buffers."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        tables = [replace(t, dim=16 if i % 2 else 3) for i, t in enumerate(setup.data.tables(3))]
        self.rows = skirl.EmbeddingBagCollection(
            tables, optimizer=setup.rows, cache=setup.cache, store=setup.store, seed=3, resume=setup.resume
        )
        self.norm = nn.BatchNorm1d(sum(t.dim for t in tables))
        self.top = nn.Sequential(nn.Dropout(0.3), nn.Linear(sum(t.dim for t in tables), 5), nn.ReLU(), nn.Linear(5, 1))

    def loss(self, batch: skirl.Batch) -> torch.Tensor:
        out = self.rows(batch.sparse)
        logits = self.top(self.norm(torch.cat([out[name] for name in out], dim=1))).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)


@dataclass
class Run:
    """A run in one process: made fresh, perhaps loaded, and trained for a while."""

    setup: Setup
    losses: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.setup.seed)
        np.random.seed(self.setup.seed)  # noqa: NPY002
        random.seed(self.setup.seed)
        self.model = Net(self.setup)
        self.dense = DENSE[self.setup.dense](self.model.parameters())
        self.schedules = [
            torch.optim.lr_scheduler.ExponentialLR(self.model.rows.optimizer, 0.97),
            torch.optim.lr_scheduler.MultiStepLR(self.dense, [3, 9], 0.5),
        ]
        self.batches = self.lookahead()
        self.begun = 0

    def lookahead(self) -> skirl.Lookahead:
        setup = self.setup
        return skirl.lookahead(
            setup.make_loader(), self.model, depth=setup.depth, prefetch=setup.prefetch, accumulate=setup.accumulate,
            timeout=120,
        )  # fmt: skip

    @property
    def parts(self) -> list[Any]:
        return [self.dense, *self.schedules]

    def save(self, folder: Path, **options: Any) -> skirl.Saving:
        return skirl.save(folder, model=self.model, optimizers=self.parts, data=self.batches, **options)

    def load(self, folder: Path) -> "Run":
        skirl.load(folder, model=self.model, optimizers=self.parts, data=self.batches)
        self.begun = self.batches.step
        return self

    def train(self, until: int | None = None, saved: Callable[[int], Path | None] = lambda step: None) -> "Run":
        """Train up to a step or to the end. `saved` gives the folder to save to after a step, or None."""
        self._train(until, saved)
        self.drawn = plain(rng_state.capture())
        return self

    def _train(self, until: int | None, saved: Callable[[int], Path | None]) -> None:
        with self.batches as batches:
            for _ in range(batches.epochs, self.setup.passes):
                for batch in batches:
                    if self.setup.early and batches.step - 1 and (folder := saved(batches.step - 1)):
                        self.save(folder)
                    loss = self.model.loss(batch)
                    loss.backward()
                    self.losses.append((batches.step, loss.item()))
                    if not batches.ends_step:
                        continue
                    self.dense.step()
                    self.dense.zero_grad()
                    for schedule in self.schedules:
                        schedule.step()
                    if not self.setup.early and (folder := saved(batches.step)):
                        self.save(folder)
                    if batches.step == until:
                        return

    def bits(self) -> dict[str, Any]:
        rows = self.model.rows
        rows.flush()
        found: dict[str, Any] = {
            "table_steps": rows.engine.packs[0].steps.tolist(),
            "lr": rows.optimizer.settings()[0].lr,
        }
        found["rows"] = {key: row.tobytes() for key, row in stored_rows(rows.engine).items()}
        for name, value in self.model.state_dict().items():
            if isinstance(value, torch.Tensor):
                found[name] = value.numpy().tobytes()
        for i, part in enumerate(self.parts):
            found[f"part {i}"] = plain(part.state_dict())
        found["drawn"] = self.drawn
        found["step"] = self.batches.step
        return found


def learned(saved: Path) -> dict[Any, bytes]:
    """Return all rows with their state, and the dense weights, of the newest checkpoint."""
    with opened(saved) as (rows, dense, *_):
        found: dict[Any, bytes] = {name: value.numpy().tobytes() for name, value in dense.items()}
        for place, collection in collections_of(rows).items():
            found |= {(place, key): row.tobytes() for key, row in stored_rows(collection.engine).items()}
    return found


def plain(value: Any) -> Any:
    """Convert a state dict so that == compares it bit by bit."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def assert_same(run: Run, whole: Run) -> None:
    """Assert that a run, perhaps a resumed one, matches a whole one: its losses from where it began, and the state at
    the end."""
    assert run.losses == [entry for entry in whole.losses if entry[0] > run.begun]
    ours, theirs = run.bits(), whole.bits()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name] == theirs[name], name
