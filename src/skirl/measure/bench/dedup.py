"""The gain from storing repeated bags once: the embedding step on session batches, against the same ones expanded."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from skirl.core.optim import RowwiseAdagrad
from skirl.measure.bench.helpers import Stopwatch, at_least_one, child, result

if TYPE_CHECKING:
    import torch

    from skirl.core.batch import KeyedJagged
    from skirl.core.tables import Table
    from skirl.nn.collection import EmbeddingBagCollection

MIDDLE = 8.0
"""The factor at which mixed batches are measured too, between the least and the greatest."""


@dataclass(frozen=True)
class DedupStep:
    """CPU time of the embedding step on batches whose lists repeat: each stored once, against the same expanded."""

    part: tuple[Literal["lookup", "mixed"], ...] = ("lookup",)
    """lookup: planner, forward and backward of an embedding collection with all rows resident, on lists and on mixed
    batches; mixed: only mixed batches."""
    factor: tuple[float, ...] = (1.0, 1.2, 2.0, 4.0, 8.0, 16.0)
    """Average number of times that a list occurs in a batch; mixed batches take the least, 8 if given, and the greatest."""
    batch: int = 2048
    """Samples in a batch."""
    lists: int = 6
    """Lists in a sample, each of which changes independently; mixed batches have one list and 26 single ids."""
    ids: int = 75
    """Ids in a list, on average; lengths range from two thirds to four thirds of this."""
    dim: int = 64
    """Numbers in a row."""
    rows: int = 200_000
    """Rows in each list's table."""
    rounds: int = 9
    """Timed steps per side; the sides take turns on three batches."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        at_least_one(self, "batch", "lists", "ids", "dim", "rows", "rounds")
        if not self.factor or min(self.factor) < 1:
            raise ValueError(f"factor is {' '.join(map(str, self.factor)) or 'empty'}: set it to numbers of 1 or more")

    def run(self) -> dict[str, Any]:
        """Measure in a process of its own."""
        return child(["-m", "skirl.measure.bench.dedup", json.dumps(asdict(self))], {})

    def measure(self) -> dict[str, Any]:
        """Measure in this process."""
        import torch

        from skirl.measure.bench.others import INSTALL, has_fbgemm

        torch.set_num_threads(1)
        found = {}
        if "lookup" in self.part:
            found["lookup"] = self._over(self.factor, lambda factor: _Lists(self, self.lists, factor))
        some = {min(self.factor), max(self.factor)} | {MIDDLE} & set(self.factor)
        found["mixed"] = self._over(sorted(some), lambda factor: _Mixed(self, factor))
        return result(
            "dedup", self, "part batch lists ids dim rows rounds", **found, missing=None if has_fbgemm() else INSTALL
        )

    def _over(self, factors: Sequence[float], data: "Callable[[float], _Lists]") -> dict[str, Any]:
        """Measure every factor and return the figures by name, then by factor."""
        found = {f"{factor:g}": _Case(self, data(factor)).measure() for factor in factors}
        names = next(iter(found.values()))
        return {name: {factor: facts[name] for factor, facts in found.items()} for name in names}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as text for a reader, by label."""
        lists = f"{self.lists} lists" if "lookup" in result else "one list and 26 single ids"
        facts = {"step": f"{self.batch:,} samples of {lists}, planner, forward and backward, one core"}
        for part in ("lookup", "mixed"):
            if part not in result:
                continue
            of = result[part]
            for factor in of["x"]:
                beside = "".join(
                    f", {of[name][factor]:.2f} of {said}"
                    for name, said in (("vs_fbgemm", "FBGEMM"), ("vs_vbe", "FBGEMM on each list once"))
                    if of[name][factor]
                )
                facts[f"{part}, factor {factor}"] = (
                    f"{of['x'][factor]:.2f} times as fast as expanded{beside}; {of['ids'][factor]:,} ids of "
                    f"{of['ids_expanded'][factor]:,}, found at {of['find_ns'][factor]:.1f} ns an id"
                )
        if result["missing"]:
            facts["missing"] = result["missing"]
        return facts


class _Lists:
    """Batches with the lists of sessions."""

    def __init__(self, bench: DedupStep, lists: int, factor: float) -> None:
        from skirl.data.sessions import ITEMS, Sessions

        samples = 16.5 if factor > 1 else 1.0
        change = (samples / factor - 1) / (samples - 1) if factor > 1 else 0.0
        if not 0 <= change <= 1:
            raise ValueError(f"factor is {factor:g}: set it to at most {samples:g}, the samples of a session")
        self.data = Sessions(
            batch_size=bench.batch,
            pooling_factor=bench.ids,
            histories=lists,
            per_session=samples,
            change=change,
            once=False,
            rows_scale=bench.rows / ITEMS,
        )
        self.dim = bench.dim

    @property
    def tables(self) -> "list[Table]":
        """One table per list."""
        from skirl.core.tables import Table

        rows = self.data.rows["item"]
        return [Table(name, rows, self.dim) for name in self.data.lists]

    def batch(self, number: int) -> "KeyedJagged":
        """Return all lists of a batch."""
        return self.data.batch(number).sparse.select(self.data.lists)


class _Mixed(_Lists):
    """Batches with one list and the single ids of a click log."""

    def __init__(self, bench: DedupStep, factor: float) -> None:
        from skirl.data.synthetic import Synthetic

        super().__init__(bench, 1, factor)
        self.singles = Synthetic("criteo-kaggle", bench.batch, rows_scale=0.02)

    @property
    def tables(self) -> "list[Table]":
        return [*self.singles.tables(self.dim), *super().tables]

    def batch(self, number: int) -> "KeyedJagged":
        from skirl.core.batch import KeyedJagged

        return KeyedJagged.concat([self.singles.batch(number).sparse, super().batch(number)])


class _Case:
    """The measurement of one factor."""

    def __init__(self, bench: DedupStep, data: _Lists) -> None:
        import torch

        from skirl.core.find import find
        from skirl.measure.bench.others import fbgemm, has_fbgemm
        from skirl.nn.collection import EmbeddingBagCollection

        self.rounds = bench.rounds
        self.tables = data.tables
        rows = sum(table.rows for table in self.tables)
        self.sides = [EmbeddingBagCollection(self.tables, optimizer=RowwiseAdagrad(lr=0.01), cache=rows) for _ in "ab"]
        self.plain = [data.batch(number) for number in range(3)]
        find(self.plain[0])  # compiles
        took = []
        for _ in range(self.rounds):
            with Stopwatch() as watch:
                self.once = [find(ids) for ids in self.plain]
            took.append(watch.cpu)
        self.find_ns = median(took) * 1e9 / sum(len(ids.values()) for ids in self.plain)
        generator = torch.Generator().manual_seed(0)
        self.grad = torch.empty(bench.batch, len(self.tables), bench.dim).uniform_(-1, 1, generator=generator)
        options: dict[str, Any] = {"lr": 0.01, "rowwise": True, "eps": 1e-8}
        self.others = [fbgemm(self.tables, **options) for _ in "ab"] if has_fbgemm() else []
        """FBGEMM's operator, for batches in full and for those with each list once."""

    def measure(self) -> dict[str, Any]:
        """Return medians over the rounds, after an untimed step on each batch that compiles and makes the rows."""
        took: list[tuple[float, ...]] = []
        for number in range(-len(self.plain), self.rounds):
            at = number % len(self.plain)
            calls: list[Callable[[], Any]] = [
                lambda at=at: self._step(self.sides[0], self.plain[at]),
                lambda at=at: self._step(self.sides[1], self.once[at]),
            ]
            if self.others:
                calls.append(lambda at=at: self._others_step(self.others[0], self.plain[at]))
                calls.append(lambda at=at: self._others_step(self.others[1], self.once[at]))
            order = list(range(len(calls)))[:: 1 if number % 2 else -1]
            times = dict(zip(order, (_cpu(calls[i]) for i in order), strict=True))
            if number < 0:
                self._compare(at)
            else:
                took.append(tuple(times[i] for i in range(len(calls))))
        ms = [round(median(of) * 1e3, 2) for of in zip(*took)]
        return {
            "x": round(median(one[0] / one[1] for one in took), 3),
            "ms": ms[1],
            "ms_expanded": ms[0],
            "vs_fbgemm": round(median(one[2] / one[1] for one in took), 3) if self.others else None,
            "vs_vbe": round(median(one[3] / one[1] for one in took), 3) if self.others else None,
            "ids": len(self.once[0].values()),
            "ids_expanded": len(self.plain[0].values()),
            "find_ns": round(self.find_ns, 2),
        }

    def _step(self, embeddings: "EmbeddingBagCollection", ids: "KeyedJagged") -> None:
        embeddings(ids).stacked().backward(self.grad)

    def _others_step(self, operator: Any, ids: "KeyedJagged") -> None:
        self._others_out(operator, ids).backward(self.grad.flatten(1))

    def _others_out(self, operator: Any, ids: "KeyedJagged") -> "torch.Tensor":
        from skirl.measure.bench.others import by_vbe

        return by_vbe(operator, ids, [table.dim for table in self.tables])

    def _compare(self, at: int) -> None:
        """Raise if the outputs of ours, or of FBGEMM's, for the batch in full and with each list once differ."""
        import torch

        batches = (self.plain[at], self.once[at])
        with torch.no_grad():
            pairs = [[side(ids).stacked() for side, ids in zip(self.sides, batches, strict=True)]]
            if self.others:
                pairs.append([self._others_out(one, ids) for one, ids in zip(self.others, batches, strict=True)])
        for full, once in pairs:
            if not torch.allclose(full, once, rtol=1e-3, atol=1e-4):
                raise AssertionError(f"outputs differ by {float((full - once).abs().max()):g}: no ratio is given")


def _cpu(call: Callable[[], Any]) -> float:
    with Stopwatch() as watch:
        call()
    return watch.cpu


if __name__ == "__main__":
    flags: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(sys.argv[1]).items()
    }
    print(json.dumps(DedupStep(**flags).measure()))
