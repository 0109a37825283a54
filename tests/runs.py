"""Train with a cache and with the reference, batch by batch, and compare every bit along the way and at the end."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch

import skirl
from skirl import KeyedJagged, Table
from skirl.core.optim import RowOptimizer
from skirl.core.reference import Bags, Reference
from skirl.core.tables import Schema
from skirl.engine.capacity import Capacity
from skirl.engine.device.gpu import GpuRows
from skirl.engine.engine import Leaving
from skirl.engine.window import FIRST_WINDOW
from skirl.engine.work import Work
from tests.engine.device.lazy import World, delayed_streams
from tests.loops import hooked
from tests.oracle.brute import Residents, window_ends
from tests.streams import Item, Loader, Naps, SlowStore, Stream, stored_rows

SMALLEST = 0
TIMEOUT = 120.0
"""Seconds until a stage counts as stuck."""


@dataclass(frozen=True)
class Part:
    """A stretch of the stream, trained under a lookahead or looked up batch by batch without one."""

    begin: int
    end: int
    passes: tuple[int | None, ...] = (None,)
    """For each pass over the stretch, the number of batches after which the loop breaks; None: it does not."""
    alone: bool = False


@dataclass(frozen=True)
class Case:
    """One run, with all the options that must not change its bits."""

    tables: tuple[Table, ...]
    optimizer: RowOptimizer | dict[str, RowOptimizer]
    """One optimizer, or one for each table by name."""
    parts: tuple[Part, ...] = (Part(0, 12),)
    seed: int = 0
    dtype: torch.dtype = torch.float32
    unpooled: bool = False
    frozen: tuple[str, ...] = ()
    # The batches.
    sizes: tuple[int, int] = (1, 4)
    longest: int = 3
    universe: int = 20
    weights: float = 0.0
    shared: float = 0.0
    """Share of batches whose samples share bags."""
    wide: bool = True
    # The plan.
    spare: int = SMALLEST
    """Rows that the cache holds beyond those of the largest batch."""
    depth: Any = 4
    prefetch: int = 2
    policy: str = "min"
    ramp: bool = True
    window_bytes: int = 4 << 30
    # The loop.
    accumulate: int = 1
    use: str = "all"
    """The features that the loss uses: all, some (drawn for each batch), stacked."""
    lost: float = 0.0
    """Share of batches whose backward, or even whose forward, never runs."""
    evaluate: float = 0.0
    """Chance of an evaluation before a forward, between forward and backward, and after backward."""
    gamma: float = 1.0
    """Factor on the learning rate at the end of every batch."""
    nap: float = 0.0
    """The longest sleep of a stage, in seconds."""
    slow_write: float = 0.0
    """Additional seconds for every write."""
    fresh: bool = True
    """Whether the loader yields fresh batches rather than reusing its buffers."""
    threads: int = 1
    device: str = "cpu"
    eager: float = 0.0
    """For streams of a device: the chance that they advance before they have to."""


@dataclass
class Report:
    """What happened in a run, for quotas."""

    works: list[Work] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    evaluations: int = 0
    updates: int = 0
    shared: bool = False
    """A row was used by two features of one batch."""
    near: int = 0
    """Number of rows fetched again at most `prefetch` steps after they left."""
    forwarded: int = 0
    fetched: int = 0
    tight: bool = False
    """A batch needed every slot of its bank."""


class Difference(AssertionError):
    """Raised when two runs that should agree do not."""


def same_bits(what: str, ours: Any, expected: Any) -> None:
    """Assert that all bits are equal, including signs of zeros."""
    a, b = (x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x) for x in (ours, expected))
    if a.shape != b.shape or a.dtype != b.dtype:
        raise Difference(f"{what}: {a.dtype} {a.shape}, expected {b.dtype} {b.shape}")
    if np.ascontiguousarray(a).tobytes() != np.ascontiguousarray(b).tobytes():
        raise Difference(f"{what}: {a.tolist()}, expected {b.tolist()}")


class Head(torch.nn.Module):
    """The dense part: one score per sample from all features that it gets, and a bounded loss."""

    def __init__(self, tables: Sequence[Table], dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.nn.ParameterDict(
            {name: torch.randn(t.dim, generator=generator, dtype=dtype) for t in tables for name in t.features}
        )

    def forward(self, parts: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        # Copied, because torch may sum a strided or unaligned view in a different order than contiguous numbers.
        parts = {name: part.clone(memory_format=torch.contiguous_format) for name, part in parts.items()}
        scores = [torch.mv(part, self.weights[name]) for name, part in parts.items()]
        if len({len(score) for score in scores}) == 1 and len(scores[0]) == len(targets):
            total = torch.stack(scores).sum(0)
            return (total * targets.to(total.dtype)).tanh().sum()
        return torch.cat(scores).tanh().sum()  # unpooled: as many scores as ids


class LastFirst(list):
    """Free blocks, of which the one released last is taken first."""

    def append(self, block: Any) -> None:
        self.insert(0, block)


class Run:
    """A case being run."""

    def __init__(self, case: Case, make: Any = KeyedJagged) -> None:
        self.case = case
        stream = Stream(
            case.tables, seed=case.seed, universe=case.universe, sizes=case.sizes, longest=case.longest,
            weights=case.weights, wide=case.wide, unpooled=case.unpooled, shared=case.shared, make=make,
        )  # fmt: skip
        length = max(part.end for part in case.parts)
        self.items = [stream.draw(i) for i in range(length)]
        self.extra = [stream.draw(length + i) for i in range(3)]
        """Batches for evaluation, with rows that may never be trained."""
        self.bags = stream.bags
        self.rng = np.random.default_rng([case.seed, 1])
        self.nap = Naps(case.nap, case.seed)
        one = case.optimizer
        self.rules = [one[table.name] if isinstance(one, dict) else one for table in case.tables]
        self.schema = Schema.of(case.tables, [(rule.rule, rule.initial_state) for rule in self.rules])
        numpy_dtype = np.dtype(str(case.dtype).removeprefix("torch."))
        self.reference = Reference(case.tables, self.rules, seed=case.seed, dtype=numpy_dtype)
        self.reference.frozen = {t for t, table in enumerate(case.tables) if table.name in case.frozen}
        kind = skirl.EmbeddingCollection if case.unpooled else skirl.EmbeddingBagCollection
        store = SlowStore(case.tables, self.rules, case.dtype, Naps(case.nap, case.seed + 1), case.slow_write)
        with pytest.MonkeyPatch.context() as patch:
            if case.device != "cpu":
                patch.setattr("skirl.engine.device.gpu.Streams", World(case.seed, case.eager).streams)
                patch.setattr(
                    "skirl.engine.device.gpu.cuda_streams", lambda at: delayed_streams(at, case.seed, case.eager)
                )
            self.ours = kind(
                case.tables, optimizer=case.optimizer, cache=self._cache(), store=store, seed=case.seed, dtype=case.dtype,
                device=case.device,
            )  # fmt: skip
        if case.frozen:
            self.ours.freeze(*case.frozen)
        for bank in self.ours.engine.banks:
            if isinstance(bank, GpuRows):
                bank.blocks._free, bank.plans._free = LastFirst(), LastFirst()
        self.heads = Head(case.tables, case.dtype), Head(case.tables, case.dtype)
        self.dense = [torch.optim.Adam(head.parameters(), lr=0.01) for head in self.heads]
        factors = [self.factor(group.optimizer) for group in self.ours.engine.packs[0].optimizers.all]
        self.schedule = torch.optim.lr_scheduler.MultiplicativeLR(
            self.ours.optimizer, [lambda step, factor=factor: factor for factor in factors]
        )
        self.lrs = [rule.lr for rule in self.rules]
        self.report = Report()
        self.residents: list[Residents] | None = []
        """The rows that should be in the cache; None once that is no longer tracked."""
        self.left: list[dict[int, int]] = [{} for _ in self.schema.banks]
        self._spy()

    def factor(self, rule: RowOptimizer) -> float:
        """Return the factor of a step on a learning rate. FTRL's stays the same."""
        return 1.0 if rule.weight_follows_state else self.case.gamma

    def go(self) -> Report:
        threads = torch.get_num_threads()
        torch.set_num_threads(self.case.threads)
        try:
            for part in self.case.parts:
                if part.alone:
                    self._alone(part)
                else:
                    self._ahead(part)
        finally:
            torch.set_num_threads(threads)
        self._compare_end()
        return self.report

    def _ahead(self, part: Part) -> None:
        case = self.case
        items = self.items[part.begin : part.end]
        loader = Loader(items, self.nap, fresh=case.fresh)
        options = {
            name: getattr(case, name) for name in ("depth", "prefetch", "accumulate", "policy", "ramp", "window_bytes")
        }
        model = torch.nn.ModuleList([self.ours, self.heads[0]])
        hook = Naps(case.nap, case.seed + 2)
        with hooked(hook, loader, model, timeout=TIMEOUT, **options) as batches:
            for stop in part.passes:
                taken, before = 0, len(self.report.works)
                if stop != 0:
                    if self.ours.engine.capacity.by_one:
                        self.residents = []  # the cache is split again, and starts empty
                    for item in batches:
                        if taken % case.accumulate == 0:
                            self._begin(items[taken : taken + case.accumulate])
                        if item.number != items[taken].number:
                            raise Difference(f"batch {item.number} was yielded, expected {items[taken].number}")
                        self._batch(item)
                        self.nap()
                        taken += 1
                        if taken == stop:
                            break
                if taken != (len(items) if stop is None else min(stop, len(items))):
                    raise Difference(f"{taken} batches were yielded, expected {len(items)}")
                self._check_plan(items, case.accumulate, case.depth, case.policy, self.report.works[before:])
        self._finish()
        self._evaluate(1.0)

    def _alone(self, part: Part) -> None:
        before = len(self.report.works)
        items = self.items[part.begin : part.end]
        for item in items:
            self._begin([item])
            self._batch(item, skip_forward=False)
        self.ours.current.finish()
        self._finish()
        self._check_plan(items, 1, 1, "min", self.report.works[before:])

    def _check_plan(self, items: list[Item], accumulate: int, depth: Any, policy: str, works: list[Work]) -> None:
        """Check that the rows that left are those that the promise names. Skip what it does not define."""
        case = self.case
        if not works:
            return
        if depth == "auto" or case.policy not in ("min", "lru") or case.window_bytes < 1 << 20:
            self.residents = None
        if self.residents is None:
            return
        if not self.residents:
            self.residents = [Residents(slots, policy) for slots in self.report.slots]
        for bank, residents in enumerate(self.residents):
            residents.policy = policy
            steps = [
                [key for item in items[i : i + accumulate] for key in self._keys(item, bank)]
                for i in range(0, len(items), accumulate)
            ]
            known = len(steps) if depth == "epoch" else depth
            ends = window_ends([(steps, residents.capacity)], depth=known, ramp=case.ramp and depth != "epoch")
            for work, leaving in zip(works, residents.run(steps, ends[: len(works)]), strict=True):
                left = work.steps[bank].evict_keys.tolist()
                if left != leaving:
                    raise Difference(f"step {work.number}: {left} left, expected {leaving}")

    def _begin(self, items: list[Item]) -> None:
        """Begin a step: the reference looks up all its micro-batches, which changes nothing before the update."""
        self._finish()
        self.expected = [
            self.reference.forward(self.bags[item.number], accumulate=bool(i)) for i, item in enumerate(items)
        ]
        self.grads: list[dict[str, np.ndarray]] = [{} for _ in items]
        self.micro = -1
        self.returned = 0
        self.updated = False

    def _finish(self) -> None:
        """End a step: the gradients of some micro-batches count even if others never came."""
        if getattr(self, "returned", 0) and not self.updated:
            self._update()

    def _update(self) -> None:
        self.reference.optimizers = [replace(rule, lr=lr) for rule, lr in zip(self.rules, self.lrs, strict=True)]
        self.reference.backward(*self.grads)
        self.updated = True
        self.report.updates += 1

    def _batch(self, item: Item, skip_forward: bool = True) -> None:
        case = self.case
        self.micro += 1
        self._note_shared(self.bags[item.number])
        self._evaluate(case.evaluate)
        if skip_forward and self.rng.random() < case.lost / 2:
            return
        out = self.ours(item.sparse)
        expected = self.expected[self.micro]
        for name, values in expected.items():
            same_bits(f"batch {item.number}, output {name}", out[name], values)
        names = self._used(expected)
        leaves = {name: torch.from_numpy(expected[name].copy()).requires_grad_() for name in names}
        self._evaluate(case.evaluate)
        if names and self.rng.random() >= case.lost / 2:
            losses = []
            for side, head in enumerate(self.heads):
                parts = self._parts(out if side == 0 else leaves, names, stacked=case.use == "stacked")
                loss = head(parts, item.targets)
                loss.backward()
                losses.append(loss)
            same_bits(f"batch {item.number}, loss", losses[0], losses[1])
            self.grads[self.micro] = {name: leaf.grad.numpy() for name, leaf in leaves.items()}
            self.returned += 1
            if self.returned == len(self.expected):
                self._update()
        self._evaluate(case.evaluate)
        for optimizer in self.dense:
            optimizer.step()
            optimizer.zero_grad()
        if case.gamma != 1:
            self.schedule.step()
            self.lrs = [lr * self.factor(rule) for lr, rule in zip(self.lrs, self.rules, strict=True)]

    def _used(self, expected: dict[str, Any]) -> list[str]:
        names = list(expected)
        if self.case.use != "some":
            return names
        return [name for name in names if self.rng.random() < 0.5]

    def _parts(self, out: Any, names: list[str], stacked: bool) -> dict[str, torch.Tensor]:
        if not stacked:
            return {name: out[name].cpu() for name in names}
        whole = torch.stack([out[name] for name in names], 1) if isinstance(out, dict) else out.stacked().cpu()
        return {name: whole[:, i] for i, name in enumerate(names)}

    def _evaluate(self, chance: float) -> None:
        """Look up another batch, perhaps. Nothing may change, not even what is resident."""
        if self.rng.random() >= chance:
            return
        item = [*self.extra, *self.items][self.rng.integers(len(self.extra) + len(self.items))]
        engine = self.ours.engine
        before = self._state()
        if self.rng.random() < 0.5:
            with torch.no_grad():
                out = self.ours(item.sparse)
        else:
            self.ours.eval()
            out = self.ours(item.sparse)
            self.ours.train()
        expected = self.reference.forward(self.bags[item.number], evaluate=True)
        for name, values in expected.items():
            same_bits(f"evaluation, output {name}", out[name], values)
        if engine.caches and self._state() != before:
            raise Difference("an evaluation changed the cache or the counters")
        self.report.evaluations += 1

    def _state(self) -> tuple[Any, ...]:
        engine = self.ours.engine
        caches = [
            (c.key_of.tobytes(), c.used.tobytes(), bank.read(np.flatnonzero(c.key_of >= 0)).tobytes(), c._clock)
            for c, bank in zip(engine.caches, engine.banks)
        ]
        moved = replace(engine.counters, written=0, bytes_written=0)  # rows in flight are counted when they arrive
        return caches, moved, engine.packs[0].steps.tolist()

    def _compare_end(self) -> None:
        engine, reference = self.ours.engine, self.reference
        self.ours.flush()
        for ours, expected in zip(self.heads[0].parameters(), self.heads[1].parameters(), strict=True):
            same_bits("a dense parameter", ours, expected)
        if engine.packs[0].steps.tolist() != reference.table_steps:
            raise Difference(f"updates by table: {engine.packs[0].steps.tolist()}, expected {reference.table_steps}")
        rows = stored_rows(engine)
        if rows.keys() != reference.rows.keys():
            raise Difference(
                f"rows stored and not trained, or not stored: {sorted(rows.keys() ^ reference.rows.keys())}"
            )
        for key, row in rows.items():
            same_bits(f"row {key & (1 << 48) - 1} of table {key >> 48}", row, reference.rows[key])
        begun = engine.first_values.tables  # tables all of whose rows exist from the start
        others = sum(key >> 48 not in begun for key in rows)
        existing = others + sum(engine.schema.tables[t].rows for t in begun)
        if len(engine.seen) != existing or not engine.seen.has(np.array([*rows], np.int64)).all():
            raise Difference(f"{len(engine.seen)} rows are noted as existing, {existing} do")
        counters, works = engine.counters, self.report.works
        planned = [
            sum(count(step) for work in works for step in work.steps)
            for count in (lambda s: s.fetches, lambda s: len(s.new_keys), lambda s: len(s.evict_keys))
        ]
        first = len(rows) - others  # planned as fetches, and counted as new
        moved = [counters.fetched + first, counters.new - first, counters.written]
        if planned != moved or counters.new != len(rows):
            raise Difference(f"counted {counters}, planned {planned}, and there are {len(rows)} rows")
        if any(bank._pending for bank in engine.banks) and not self.case.parts[-1].alone:
            raise Difference("rows are still in flight")

    # What the steps did.

    def _spy(self) -> None:
        engine = self.ours.engine
        load = engine.load

        def spied(work: Work) -> Leaving:
            left = load(work)
            self._note_step(work)
            if self.case.device != "cpu":
                self.nap()  # the stages advance while the streams do not
            return left

        engine.load = spied

    def _note_step(self, work: Work) -> None:
        """Check a step against the resident rows, and count."""
        report, case = self.report, self.case
        if work.number == 0:
            self.left = [{} for _ in self.schema.banks]  # step numbers start again with each planner
        report.slots = [len(cache) for cache in self.ours.engine.caches]
        for bank, step in enumerate(work.steps):
            left = self.left[bank]
            left.update((key, work.number) for key in step.evict_keys.tolist())
            for key in (*step.fetch_keys.tolist(), *step.forward_keys.tolist()):
                report.near += work.number - left.get(key, -(10**9)) <= case.prefetch
            report.forwarded += len(step.forward_keys)
            report.fetched += step.fetches
            report.tight |= len(step.rows) == report.slots[bank]
            if len(np.unique(step.rows)) != len(step.keys):
                raise Difference(f"step {work.number}: two rows in one slot")
        report.works.append(work)

    def _note_shared(self, bags: dict[str, Bags]) -> None:
        for table in self.case.tables:
            sets = [set(bags[name][0]) for name in table.features]
            self.report.shared |= len(set().union(*sets)) < sum(map(len, sets))

    def _cache(self) -> int:
        """Return the smallest cache that holds every batch, plus `spare`; the split by the first window's demand may
        need more."""
        case = self.case
        steps = [
            self.items[i : i + case.accumulate] for i in range(max(1, len(self.items) - case.accumulate + 1))
        ]  # wherever a step may begin after a break
        need = np.max([self._demand(step) for step in steps], axis=0)
        windows = []
        if case.parts[0].alone:
            windows.append([[self.items[case.parts[0].begin]]])
        ahead = next((part for part in case.parts if not part.alone), None)
        if ahead is not None:
            count = FIRST_WINDOW if isinstance(case.depth, str) else min(FIRST_WINDOW, case.depth)
            begins = range(ahead.begin, ahead.end, case.accumulate)
            window = [self.items[i : min(i + case.accumulate, ahead.end)] for i in begins][:count]
            # A small window also ends the first one early, and this does not work out after how many batches.
            least = len(window) if case.window_bytes > 1 << 20 else 1
            windows += [window[:n] for n in range(least, len(window) + 1)]
        cache = int(max(1, sum(need)))
        while not all((self._split(cache, window) >= need).all() for window in windows):
            cache += ceil(cache / 50)
        return cache + case.spare

    def _split(self, cache: int, window: list[list[Item]]) -> np.ndarray:
        largest = np.max([self._demand(step) for step in window], axis=0)
        banks = self.schema.banks
        if len(banks) == 1:
            return np.array([cache])
        if cache < sum(np.maximum(largest, 1)):
            return np.zeros(len(banks))
        rows = [sum(self.case.tables[t].rows for t in bank.tables) for bank in banks]
        demand = self._demand([item for step in window for item in step])
        capacity = Capacity(cache, rows, [1] * len(banks))
        return np.array(capacity.divide(demand.tolist(), largest.tolist(), in_flight=1).slots)

    def _demand(self, items: list[Item]) -> np.ndarray:
        banks = range(len(self.schema.banks))
        return np.array([len({key for item in items for key in self._keys(item, bank)}) for bank in banks])

    def _keys(self, item: Item, bank: int) -> list[int]:
        features = self.schema.banks[bank].features
        return [f.table << 48 | i for f in features for i in self.bags[item.number][f.name][0]]
