"""The rows of a collection: cache, store, optimizer and what is known of every row, behind the module.

The engine knows the store, what is in the cache and what is damaged; it moves rows by Steps and decides nothing. Where the
cache is and how its rows are computed on is for one `BankRows` a bank (device/), in host memory or on a GPU. An engine for
each would say twice what a loss of rows means, and how evaluation, checkpoints and imports see them.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from skirl.core.half import HALVES, expanded, packed, words
from skirl.core.ids import BankIds, Captured, positions_of, resolve
from skirl.core.initial import InitialTable, fill
from skirl.core.optim import RowOptimizer
from skirl.core.positions import Positions
from skirl.core.tables import Schema, Table
from skirl.engine.cache import Cache, CacheSize, parse_cache, split_cache
from skirl.engine.device import open_device
from skirl.engine.device.base import BankFacts, BankRows, Update
from skirl.engine.work import Work
from skirl.oracle.seen import Seen
from skirl.store import Record, Store, open_store
from skirl.tools.threads import run

_DTYPES = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}


Leaving = list[tuple[np.ndarray, Any]]
"""Rows that left the cache in one step: for each bank their keys, and what it knows their records by."""


@dataclass
class Counters:
    """Rows moved since the engine was made; counted where they move, not where they were planned."""

    steps: int = 0
    fetched: int = 0
    """Rows brought in again, out of the store or out of a pending write-back."""
    forwarded: int = 0
    """Those of them out of a pending write-back."""
    new: int = 0
    written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class Damaged(RuntimeError):
    """Rows were lost on the way; the message says how, and what to do."""


@dataclass(frozen=True)
class Size:
    """What one bank takes in memory beside the store.

    >>> print(Size(dim=64, rows=1_000_000, slots=50_000, staging_rows=4_000, record_bytes=260, staging_bytes=900_000))
    dim 64: 50,000 of 1,000,000 rows in the cache (12.4 MiB), 4,000 on their way (1.0 MiB; 0.9 MiB allocated)
    """

    dim: int
    rows: int
    """Of all its tables."""
    slots: int
    """Rows that the cache holds."""
    staging_rows: int
    """Rows on their way beside them, at most; one step that needs more goes alone."""
    record_bytes: int
    staging_bytes: int
    """Memory of staging buffers now."""

    @property
    def nbytes(self) -> int:
        """Cache and staging as planned."""
        return (self.slots + self.staging_rows) * self.record_bytes

    def __str__(self) -> str:
        cache, staging = self.slots * self.record_bytes, self.staging_rows * self.record_bytes
        return (
            f"dim {self.dim}: {self.slots:,} of {self.rows:,} rows in the cache ({cache / (1 << 20):.1f} MiB), "
            f"{self.staging_rows:,} on their way ({staging / (1 << 20):.1f} MiB; {self.staging_bytes / (1 << 20):.1f} MiB "
            "allocated)"
        )


class Engine:
    """Everything but the module around it."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        optimizer: RowOptimizer,
        cache: CacheSize,
        store: str | Store,
        dtype: torch.dtype,
        seed: int,
        resume: bool,
        pooled: bool = True,
        device: str | torch.device = "cpu",
    ) -> None:
        if dtype not in (*_DTYPES, *HALVES):
            raise ValueError(
                f"dtype is {dtype}: set it to torch.float32 or torch.float64, or on a GPU to torch.bfloat16 or torch.float16"
            )
        if not 0 <= seed < 1 << 63:
            raise ValueError(f"seed is {seed}: set it between 0 and 2**63 - 1")
        if not isinstance(optimizer, RowOptimizer):
            raise TypeError(
                f"optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}: rows have their own, set it to "
                "skirl.SGD, skirl.Adagrad, skirl.RowwiseAdagrad or skirl.Adam"
            )
        parse_cache(cache)
        self.schema = Schema.of(tables)
        self.optimizer = optimizer
        self.cache_size = cache
        self.torch_dtype = dtype
        self.half = dtype if dtype in HALVES else None
        """What rows are held in, where it is not what is computed in."""
        self.dtype = _DTYPES[torch.float32 if self.half else dtype]
        """What is computed in, and what rows are given out as."""
        self.seed = seed
        self.pooled = pooled
        self.device = open_device(device, self.dtype)
        self.widths = [optimizer.width(bank.dim) for bank in self.schema.banks]
        """Numbers of a row and its state."""
        self.held = [words(width) if self.half else width for width in self.widths]
        """Numbers in its record, as the store has it."""
        records = {t: Record(self.held[i], self.dtype) for i, b in enumerate(self.schema.banks) for t in b.tables}
        self.store = open_store(store, records, rows={t: table.rows for t, table in enumerate(self.schema.tables)})
        self.initial = InitialTable.of([t.initial for t in self.schema.tables], self.dtype)
        self.seen = Seen(self.schema)
        if len(self.store):
            if not resume:
                refusal = (
                    f"the store {self.store!r} already holds {len(self.store)} rows: pass resume=True to go on with them, "
                    "or name an empty store"
                )
                if self.store is not store:
                    self.store.close()  # opened here; a second try must find it free
                raise ValueError(refusal)
            self.seen.rebuild(self.store.held())
        self.caches: list[Cache] = []
        self.staging_rows: list[int] = []
        self.split_by_one = False
        """The cache was split by the demand of a single batch, before any lookahead."""
        self.table_steps = np.zeros(len(self.schema.tables), np.int64)
        self.counters = Counters()
        self.saving: Any = None
        """The last checkpoint that was begun or loaded: a `skirl.checkpoint.Saving`."""
        self.damage: str | None = None
        """What happened and what to do; every later use repeats it."""
        self._cause: BaseException | None = None
        self.banks = self._open_banks()
        """What holds and computes on the cache, one a bank."""
        self._table_of = [np.array([f.table for f in bank.features], np.int64) for bank in self.schema.banks]
        self._pid = os.getpid()

    def _open_banks(self) -> list[BankRows]:
        facts = [
            BankFacts(
                number=i,
                dim=bank.dim,
                width=self.held[i],
                half=self.half,
                features=len(bank.features) if self.pooled else 1,
                dtype=self.dtype,
                optimizer=self.optimizer,
                initial=self.initial,
                seed=self.seed,
            )
            for i, bank in enumerate(self.schema.banks)
        ]
        return self.device.banks(facts)

    @property
    def in_flight_rows(self) -> int:
        """Rows held for a step's write-back or for forwarding, right now."""
        return sum(bank.in_flight for bank in self.banks)

    def check(self) -> None:
        """Refuse to go on when rows were lost, after `close`, or in a forked child."""
        if self.damage:
            raise Damaged(self.damage) from self._cause
        self.check_process()
        if self.store.closed:
            raise RuntimeError(
                "these embeddings are closed: make new ones, with resume=True if the store has kept its rows"
            )

    def check_process(self) -> None:
        """Refuse to go on in a forked child."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this process is a fork of the one that made the embeddings: rows move by threads, which a fork does not "
                "inherit. Make the embeddings in the child, or start it with the 'spawn' method"
            )

    def lose(self, what: str, cause: BaseException | None = None) -> None:
        """Rows are lost: from now on every use is refused with this sentence. The first loss is the one to know of."""
        if self.damage is None:
            self.damage, self._cause = f"{what}. Make new embeddings and resume from a checkpoint", cause

    def positions(self, captured: Sequence[Captured]) -> list[Positions]:
        """Check a step's ids, for every bank."""
        return [
            Positions.joined([positions_of(one, self.schema, bank) for one in captured])
            for bank in range(len(self.schema.banks))
        ]

    def resolve(self, captured: Captured) -> list[BankIds]:
        """Check a batch's ids and find the bags for every bank."""
        parts = [resolve(captured, self.schema, bank, self.dtype) for bank in range(len(self.schema.banks))]
        return parts if self.pooled else [ids.unpooled() for ids in parts]

    def forget_split(self) -> None:
        """A lookahead begins: what a batch looked up alone has decided of the cache does not hold for its window."""
        if not self.split_by_one:
            return
        self.flush()
        self.forget_moves()
        self.banks = self._open_banks()  # the old caches go before the new ones are made: a device has no room for both
        self.caches, self.staging_rows, self.split_by_one = [], [], False

    def make_caches(self, distinct: Sequence[int], largest: Sequence[int], in_flight: int) -> None:
        """Allocate the caches, once: split between banks by the demand of the first window."""
        if self.caches:
            return
        banks = self.schema.banks
        slots, self.staging_rows = split_cache(
            self.cache_size,
            rows=[sum(self.schema.tables[t].rows for t in bank.tables) for bank in banks],
            record_bytes=[width * self.dtype.itemsize for width in self.held],
            dims=[bank.dim for bank in banks],
            distinct=distinct,
            largest=largest,
            in_flight=in_flight,
            free=self.device.free_bytes,
        )
        self._allocate(slots)

    def _allocate(self, slots: Sequence[int]) -> None:
        self.caches = [
            Cache(bank.allocate(n, staging))
            for bank, n, staging in zip(self.banks, slots, self.staging_rows, strict=True)
        ]

    @property
    def split(self) -> dict[str, Any] | None:
        """How the cache was split between banks, for a resumed run; None before it was."""
        if not self.caches:
            return None
        return {"cache": self.cache_size, "slots": [len(c) for c in self.caches], "staging_rows": self.staging_rows}

    def may_split(self, split: Any) -> bool:
        """Whether `split` is one that this engine could have made: it may come from a file."""
        if split is None or split["cache"] != self.cache_size:
            return True
        kind, amount = parse_cache(self.cache_size)
        banks = [sum(self.schema.tables[t].rows for t in bank.tables) for bank in self.schema.banks]
        counts = [*split["slots"], *split["staging_rows"]]
        if len(counts) != 2 * len(banks) or not all(type(n) is int and 0 < n < 1 << 48 for n in counts):
            return False
        weights = [w * self.dtype.itemsize for w in self.held] if kind == "bytes" else [1 for _ in banks]
        most = amount * sum(banks) if kind == "share" else amount
        taken = sum(n * weight for n, weight in zip(split["slots"], weights, strict=True))
        if kind == "auto":  # another machine may have had more free: the split stays, and has to fit here
            weights = [w * self.dtype.itemsize for w in self.held]
            taken, most = sum(n * w for n, w in zip(counts, weights + weights)), self.device.free_bytes()
        return all(n <= rows for n, rows in zip(split["slots"], banks, strict=True)) and taken <= max(1, most)

    @property
    def staging_halves(self) -> list[int]:
        """For each bank: rows that may be on their way in, and as many on their way out."""
        return [rows // 2 for rows in self.staging_rows]

    def sizes(self) -> list[Size]:
        """What is held in memory, once the first batches have decided it: one entry for each dim."""
        tables = self.schema.tables
        return [
            Size(
                dim=bank.dim,
                rows=sum(tables[t].rows for t in bank.tables),
                slots=len(self.caches[i]),
                staging_rows=self.staging_rows[i],
                record_bytes=self.held[i] * self.dtype.itemsize,
                staging_bytes=self.banks[i].staging_bytes,
            )
            for i, bank in enumerate(self.schema.banks[: len(self.caches)])
        ]

    def load(self, work: Work, write_back: Callable[[int, Leaving], None]) -> None:
        """Make the rows of a step resident: evict, forward, put what was fetched, make what is new."""
        try:
            leaving = [self._load_bank(bank, work) for bank in range(len(work.steps))]
        except BaseException as error:
            self.lose(f"rows of step {work.number} were being moved when {error!r} happened", error)
            raise
        work.fetched = []
        self.counters.steps += 1
        write_back(work.number, leaving)

    def _load_bank(self, bank: int, work: Work) -> tuple[np.ndarray, Any]:
        cache, step = self.caches[bank], work.steps[bank]
        cache.changing(step.evict_slots)
        leaving = self.banks[bank].load(work, work.fetched[bank])
        came = [
            (step.fetch_keys, step.fetch_slots),
            (step.forward_keys, step.forward_slots),
            (step.new_keys, step.new_slots),
        ]
        cache.record(step.evict_slots, came, step.rows)
        record_bytes = self.held[bank] * self.dtype.itemsize
        self.counters.fetched += step.fetches
        self.counters.forwarded += len(step.forward_keys)
        self.counters.new += len(step.new_keys)
        self.counters.written += len(step.evict_keys)
        self.counters.bytes_read += len(step.fetch_keys) * record_bytes
        self.counters.bytes_written += len(step.evict_keys) * record_bytes
        return step.evict_keys, leaving

    def fetch(self, work: Work) -> Iterator[Any]:
        """Read a step's rows from the store, bank by bank."""
        for bank, step in zip(self.banks, work.steps, strict=True):
            arrival = bank.arriving(work)
            if len(step.fetch_keys):
                found = self.store.read(step.fetch_keys, bank.room(arrival))
                if not found.all():
                    key = int(step.fetch_keys[np.argmin(found)])
                    raise Damaged(
                        f"row {key & ((1 << 48) - 1)} of table {self.schema.tables[key >> 48].name!r} was trained before "
                        f"and is not in the store {self.store!r}: the store was changed by someone else; resume from a "
                        "checkpoint"
                    )
            bank.shipped(arrival, work)
            yield arrival

    def write(self, leaving: Leaving) -> None:
        """Write what left the cache in one step, and give its buffers back."""
        for bank, (keys, rows) in zip(self.banks, leaving, strict=True):
            if len(keys):
                try:
                    self.store.write(keys, bank.landed(rows))
                except BaseException as error:
                    lost = f"{len(keys)} rows that left the cache could not be written to {self.store!r}: {error!r}"
                    self.lose(lost, error)
                    raise
            bank.written(rows)

    def forget_moves(self) -> None:
        """All is written and nothing will be forwarded any more: let go of what is on its way."""
        for bank in self.banks:
            bank.forget_moves()

    def update(self, work: Work, lr: float) -> None:
        """Backward's end: sum the gradients of every row and apply the row optimizer once."""
        raised = np.zeros(len(self.schema.tables), np.bool_)
        for (bank, _), live in work.live.items():
            raised[self._table_of[bank][live]] = True
        self.table_steps += raised
        scalars = self.optimizer.scalars(lr, self.table_steps, self.dtype)
        for bank in range(len(self.schema.banks)):
            self._update_bank(work, bank, scalars)
        work.updated = True
        work.grads.clear()

    def _update_bank(self, work: Work, bank: int, scalars: np.ndarray) -> None:
        parts = [work.grads.get((bank, m)) for m in range(len(work.micros))]
        if any(part is not None for part in parts):
            self.caches[bank].changing(work.steps[bank].rows)
            self.banks[bank].update(Update(work, parts, self._live(work, bank), scalars, self.counters.steps))

    def _live(self, work: Work, bank: int) -> np.ndarray:
        """Which rows of the output got a gradient: by feature where that is enough, else one by one."""
        features = len(self.schema.banks[bank].features)
        masks = [work.live.get((bank, m), np.zeros(features, np.bool_)) for m in range(len(work.micros))]
        if all(mask.all() for mask in masks):
            return np.ones(1, np.bool_)
        if self.pooled and all((mask == masks[0]).all() for mask in masks):
            return masks[0]
        return np.concatenate([m.ids[bank].by_bag(mask) for mask, m in zip(masks, work.micros, strict=True)])

    def peek(self, keys: np.ndarray, bank: int) -> tuple[np.ndarray, np.ndarray]:
        """The executed state of some rows, changing nothing: their records, and the place of each key among them."""
        distinct, place = np.unique(keys, return_inverse=True)
        rows = np.empty((len(distinct), self.widths[bank]), self.dtype)
        slots = self.caches[bank].find(distinct) if self.caches else np.full(len(distinct), -1)
        here = slots >= 0
        rows[here] = self._numbers(self.banks[bank].read(slots[here]), bank) if self.caches else 0
        away = np.flatnonzero(~here)
        known = away[self.seen.has(distinct[away])]
        found = np.zeros(len(distinct), np.bool_)
        found[here] = True
        if len(known):
            records = np.empty((len(known), self.held[bank]), self.dtype)
            held = self.store.read(distinct[known], records)
            rows[known[held]] = self._numbers(records[held], bank)
            found[known[held]] = True
        fresh = np.flatnonzero(~found).astype(np.int32)
        self.make(bank, distinct[fresh], fresh, rows)
        if self.half:
            rows[fresh] = self._numbers(packed(rows[fresh], self.half), bank)
        return rows, place.astype(np.int32)

    def _numbers(self, records: np.ndarray, bank: int) -> np.ndarray:
        """Rows out of their records."""
        return expanded(records, self.widths[bank], self.half) if self.half else records

    def put(self, keys: np.ndarray, records: np.ndarray, bank: int) -> None:
        """Rows that come from elsewhere take the place of what there is; between steps."""
        records = packed(records, self.half) if self.half else records
        self.store.write(keys, records)
        self.seen.add(keys)
        if self.caches:
            slots = self.caches[bank].find(keys)
            here = np.flatnonzero(slots >= 0)
            self.caches[bank].changing(slots[here])
            self.banks[bank].write(slots[here], records[here])

    def flush(self) -> None:
        """Write every resident row to the store; all stay resident. Write-backs must be drained."""
        self.check()
        for bank, cache in zip(self.banks, self.caches, strict=False):  # no caches before the first batch
            slots = np.flatnonzero(cache.key_of >= 0)
            for part in np.array_split(slots, max(1, len(slots) // 65536)):
                if len(part):
                    self.store.write(cache.key_of[part], bank.read(part))
        self.store.flush()

    def restore(
        self, thaw: Callable[[], None], *, table_steps: Sequence[int], counters: Counters, split: dict[str, Any] | None
    ) -> None:
        """Have the store take all rows from elsewhere; what was here is gone. No lookahead may be iterating.

        A cache of the same size is split as it was: another split could leave a bank too few slots for a batch to come.
        """
        self.check_process()
        thaw()  # all or nothing; from here on nothing is expected to fail
        self.damage = "rows were being restored when something happened: load again"
        self.forget_moves()
        self.banks = self._open_banks()
        self.caches, self.staging_rows, self.split_by_one = [], [], False
        if split is not None and split["cache"] == self.cache_size:
            self.staging_rows = list(split["staging_rows"])
            self._allocate(split["slots"])
        self.seen.rebuild(self.store.held())
        self.table_steps[:] = table_steps
        self.counters = counters
        self.damage = None

    def make(self, bank: int, keys: np.ndarray, slots: np.ndarray, into: np.ndarray) -> None:
        """First records of some rows, in the host's memory."""
        dim, initial = self.schema.banks[bank].dim, self.initial
        run(
            fill, len(keys), keys, slots, into, dim, self.seed, initial.kind, initial.scale, initial.quantiles,
            self.optimizer.initial_state, threads=torch.get_num_threads(),
        )  # fmt: skip
