"""The rows of one collection: its cache, its store, its optimizer, and the moves between them that a Step asks for.

Where the cache is and how it is computed on is for one `BankRows` a bank (device/), in host memory or on a GPU.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from skirl.core.groups import Groups, RowOptimizers, Setting
from skirl.core.half import HALVES, packed, words
from skirl.core.ids import Resolver
from skirl.core.initial import InitialTable, fill
from skirl.core.keys import row_of, table_of
from skirl.core.tables import Schema, Table
from skirl.engine.begun import Begun
from skirl.engine.cache import Cache
from skirl.engine.capacity import CacheSize, Capacity, Size, Split
from skirl.engine.counters import Counters
from skirl.engine.device import open_device, torch_device
from skirl.engine.device.base import BankFacts, BankRows, Update
from skirl.engine.exchange import Exchange, exchange_with
from skirl.engine.work import Work
from skirl.oracle.seen import Seen
from skirl.peers.processes import launched_here
from skirl.store import Record, Store, open_store
from skirl.store.own_folder import own_folder
from skirl.tools.os_errors import why

_DTYPES = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}


Leaving = list[tuple[np.ndarray, Any]]
"""Rows that left the cache in one step: for each bank their keys, and what it knows their records by."""


class Damaged(RuntimeError):
    """Rows were lost on the way; the message says how, and what to do."""


class Engine:
    """Everything but the module around it."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        optimizer: RowOptimizers,
        cache: CacheSize,
        store: str | Store,
        dtype: torch.dtype,
        seed: int,
        resume: bool,
        pooled: bool = True,
        device: str | torch.device = "cpu",
        banks: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        if dtype not in (*_DTYPES, *HALVES):
            raise ValueError(
                f"dtype is {dtype}: set it to torch.float32 or torch.float64, or on a GPU to torch.bfloat16 or torch.float16"
            )
        if not 0 <= seed < 1 << 63:
            raise ValueError(f"seed is {seed}: set it between 0 and 2**63 - 1")
        self.optimizers = Groups(Schema.of(tables).tables, optimizer)
        """The row optimizer of each table."""
        self.schema = Schema.of(tables, self.optimizers.records, banks)
        self.frozen = np.zeros(len(self.schema.tables), np.bool_)
        """Tables whose rows are looked up and not trained."""
        self.torch_dtype = dtype
        self.half = dtype if dtype in HALVES else None
        """What rows are held in, where it is not what is computed in."""
        self.dtype = _DTYPES[torch.float32 if self.half else dtype]
        """What is computed in, and what rows are given out as."""
        self.seed = seed
        self.pooled = pooled
        self.exchange = exchange_with(torch_device(device))  # of several GPUs it chooses one
        """With the other trainers, where there are some: each owns the rows whose keys are its own."""
        self.device = open_device(device, self.dtype)
        if self.exchange is not None:
            self.exchange.issues = self.device.issues_moves
        self.resolver = Resolver(self.schema, self.dtype, pooled)
        if isinstance(store, str):
            rank, others = (0, launched_here()) if self.exchange is None else (self.exchange.peers.rank, True)
            store = own_folder(store, rank, among_others=others)
        self.widths = [self.optimizers[bank.tables[0]].width(bank.dim) for bank in self.schema.banks]
        """Numbers of a row and its state."""
        self.held = [words(width) if self.half else width for width in self.widths]
        """Numbers in its record, as the store has it."""
        record_bytes = [width * self.dtype.itemsize for width in self.held]
        sites, near = (1, 1) if self.exchange is None else (self.exchange.peers.size, self.exchange.peers.near)
        self.capacity = Capacity(cache, self.schema, record_bytes, self.device.free_bytes, sites, near)
        records = {t: Record(self.held[i], self.dtype) for i, b in enumerate(self.schema.banks) for t in b.tables}
        self.store = open_store(store, records, rows={t: table.rows for t, table in enumerate(self.schema.tables)})
        self.initial = InitialTable.of([t.initial for t in self.schema.tables], self.dtype)
        self.seen = Seen(self.schema)
        try:
            if len(self.store) and not resume:
                raise ValueError(
                    f"the store {self.store!r} already holds {len(self.store)} rows: pass resume=True to go on with them "
                    "(`skirl train`: --resume and --save), or set store to an empty one"
                )
            self.begun = Begun(self.schema, str(dtype).removeprefix("torch."), seed)
            """What exists and the store has not."""
            self.begun.check_store(self.store)
            self.begun.begin(self.seen, self.store.held() if len(self.store) else ())
        except BaseException:
            if self.store is not store:
                self.store.close()  # opened here; a second try must find it free
            raise
        self.caches: list[Cache] = []
        self.table_steps = np.zeros(len(self.schema.tables), np.int64)
        self.counters = Counters()
        self.asked = np.zeros((sites, len(self.schema.tables)), np.int64)
        """Of several trainers: rows that this one has read of each owner, by table: so many values came."""
        self._counting = threading.Lock()
        self.saving: Any = None
        """The last checkpoint that was begun or loaded: a `skirl.checkpoint.Saving`."""
        self.damage: str | None = None
        """What happened and what to do; every later use repeats it."""
        self._cause: BaseException | None = None
        self.banks = self._open_banks()
        """What holds and computes on the cache, one a bank."""
        self.table_of = [np.array([f.table for f in bank.features], np.int64) for bank in self.schema.banks]
        """Of each bank: the table of each feature."""
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
                kind=self.optimizers[bank.tables[0]].kind,
                initial_state=self.optimizers[bank.tables[0]].initial_state,
                clips=any(self.optimizers[t].clip is not None for t in bank.tables),
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

    def stands_for(self, other: "Engine") -> bool:
        """Whether a plan of these rows is one of those."""
        return other is self

    def check(self) -> None:
        """Refuse to go on when rows were lost, after `close`, or in a forked child."""
        if self.damage:
            raise Damaged(self.damage) from self._cause
        self.check_process()
        if self.store.closed:
            raise RuntimeError(
                "these embeddings are closed: make new ones, with resume=True if the store has kept its rows"
            )

    def check_alone(self, what: str) -> None:
        """Refuse what several trainers cannot do together yet."""
        if self.exchange is not None:
            raise ValueError(
                f"{what} is for one trainer, and {self.exchange.peers.size} share these rows: call skirl.save on all of "
                "them, and start one process on its checkpoint"
            )

    def check_process(self) -> None:
        """Refuse to go on in a forked child."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this process is a fork of the one that made the embeddings: rows move by threads, which a fork does not "
                "inherit. Make the embeddings in the child, or start it with the 'spawn' method"
            )

    def adopt(self) -> None:
        """A forked child goes on with its copy: it looks rows up, and `store.in_any_process`."""
        self._pid = os.getpid()

    def lose(self, what: str, cause: BaseException | None = None) -> None:
        """Rows are lost: from now on every use is refused with this sentence. The first loss is the one to know of."""
        if self.damage is None:
            then = "" if what.endswith("from a checkpoint") else ". Make new embeddings and resume from a checkpoint"
            self.damage, self._cause = what.rstrip(".") + then, cause

    def forget_split(self) -> None:
        """A lookahead begins: how a batch that was looked up alone has split the cache does not hold for its window."""
        if self.capacity.by_one:
            self.drop_caches()

    def make_caches(self, distinct: Sequence[int], largest: Sequence[int], in_flight: int) -> None:
        """Allocate the caches for batches of at most this many rows a bank, unless there are some."""
        if not self.caches:
            self.allocate(self.capacity.decide([largest], distinct, in_flight=in_flight, number=0))

    def allocate(self, split: Split) -> None:
        """Allocate the caches; there are none."""
        self.caches = [
            Cache(bank.allocate(n, staging))
            for bank, n, staging in zip(self.banks, split.slots, split.staging_rows, strict=True)
        ]
        self.capacity.take(split)

    def split_anew(self, split: Split) -> None:
        """Write all resident rows to the store and begin with empty caches. Write-backs must be drained."""
        try:
            self.drop_caches()
            self.allocate(split)
        except BaseException as error:
            self.lose(f"the cache was being split again, and then: {why(error)}", error)
            raise

    def drop_caches(self) -> None:
        """Write all resident rows to the store; the next batches decide on new caches. Write-backs must be drained."""
        self.flush()
        self.forget_moves()
        self.banks = self._open_banks()  # the old caches go before the new ones are made: a device has no room for both
        self.caches = []
        self.capacity.forget()

    def release(self) -> None:
        """Give the memory of cache and staging back; all is in the store, and nothing is looked up any more."""
        self.banks, self.caches = [], []
        self.capacity.forget()

    def sizes(self) -> list[Size]:
        """What is held in memory, once the first batches have decided it: one entry for each dim."""
        record_bytes = [held * self.dtype.itemsize for held in self.held]
        return self.capacity.sizes(record_bytes, [bank.staging_bytes for bank in self.banks])

    def load(self, work: Work) -> Leaving:
        """Make the rows of a step resident: evict, forward, put what was fetched, make what is new. Gives what left."""
        try:
            leaving = [self._load_bank(bank, work) for bank in range(len(work.steps))]
        except BaseException as error:
            self.lose(f"rows of step {work.number} were being moved, and then: {why(error)}", error)
            raise
        work.fetched = []
        self.counters.steps += 1
        return leaving

    def bring_values(self, work: Work) -> None:
        """The step's rows are resident with all owners: get the values of those that this trainer reads."""
        if self.exchange is not None:
            self.exchange.values(self.banks, work)
            for bank, reads in zip(self.schema.banks, work.reads, strict=True):
                self.asked[:, bank.tables] += reads.counts

    def link(self, work: Work, after: Work | None) -> bool:
        """Agree on what is critical between the step in the loop and the next: whether values of that may come early."""
        assert self.exchange is not None
        return self.exchange.link(self.banks, work, after, [len(cache) for cache in self.caches])

    def settle(self) -> None:
        """Wait until no gradient is on its way to another trainer; all trainers call this after the same step."""
        if self.exchange is not None:
            with self._losing("gradients were on their way"):
                self.exchange.settle()
                for bank in self.banks:
                    bank.join()

    def give_up(self) -> None:
        """The loop has ended; with other trainers that left theirs elsewhere, rows are lost."""
        if self.exchange is not None and not self.exchange.settled:
            why = self.exchange.peers.over or "the job has ended"
            self.lose(f"{why}, and gradients were on their way between trainers")

    def complete(self, wait: bool = True) -> None:
        """End the update of the step in the loop, as far as the next one needs it; or not yet, to wait for no move."""
        if self.exchange is not None and (wait or self.exchange.moved):
            with self._losing("gradients were on their way"):
                self.exchange.complete()

    @contextmanager
    def _losing(self, what: str) -> Iterator[None]:
        """An error in this block loses rows."""
        try:
            yield
        except BaseException as error:
            self.lose(f"{what}, and then: {why(error)}", error)
            raise

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
        found = work.found[bank]
        made = len(step.fetch_keys) - found  # from an array: no store has had them
        self.counters.fetched += found + len(step.forward_keys)
        self.counters.forwarded += len(step.forward_keys)
        self.counters.new += len(step.new_keys) + made
        self.counters.bytes_read += found * self.held[bank] * self.dtype.itemsize
        return step.evict_keys, leaving

    def fetch(self, work: Work) -> None:
        """Read a step's rows from the store."""
        for bank, step in zip(self.banks, work.steps, strict=True):
            arrival, count = bank.arriving(work), 0
            if len(step.fetch_keys):
                room = bank.room(arrival)
                found = self.store.read(step.fetch_keys, room)
                count = int(np.count_nonzero(found))
                if count < len(found):
                    self._begin(bank, step.fetch_keys, np.flatnonzero(~found), room)
            bank.shipped(arrival, work)
            work.fetched.append(arrival)
            work.found.append(count)

    def _begin(self, bank: BankRows, keys: np.ndarray, places: np.ndarray, room: np.ndarray) -> None:
        """First records of rows that the store has not: those of arrays, and with one plan for several those of others."""
        facts, new = bank.facts, keys[places]
        initial, slots = facts.initial, np.arange(len(new), dtype=np.int32)
        records = np.empty((len(new), self.widths[facts.number]), self.dtype)
        fill(
            new, slots, records, facts.dim, facts.seed, initial.kind, initial.scale, initial.quantiles,
            facts.initial_state, 0, len(new),
        )  # fmt: skip
        self.first(new, records)
        room[places] = packed(records, self.half) if self.half else records

    def first(self, keys: np.ndarray, into: np.ndarray) -> None:
        """The weights of rows from an array, to into[i] for keys[i]; refused if the store has had one and lost it."""
        new = self.begun.first(keys, into)
        if not new.all():
            key = keys[np.argmin(new)]
            raise Damaged(
                f"row {row_of(key)} of table {self.schema.tables[table_of(key)].name!r} was trained before and is not in "
                f"the store {self.store!r}: the store was changed by someone else; resume from a checkpoint"
            )

    def write(self, leaving: Leaving) -> None:
        """Write what left the cache in one step, and give its buffers back."""
        for bank, (keys, rows) in zip(self.banks, leaving, strict=True):
            if len(keys):
                try:
                    records = bank.landed(rows)
                    taken = self.store.write(keys, records)
                except BaseException as error:
                    lost = f"{len(keys)} rows that left the cache could not be written to {self.store!r}: {why(error)}"
                    self.lose(lost, error)
                    raise
                with self._counting:  # two threads write
                    self.begun.wrote(keys)
                    self.counters.written += taken
                    self.counters.bytes_written += taken * records.itemsize * records.shape[1]
            bank.written(rows)

    def forget_moves(self) -> None:
        """All is written and nothing will be forwarded any more: let go of what is on its way."""
        for bank in self.banks:
            bank.forget_moves()

    def trained(self, bank: int) -> np.ndarray:
        """Of each feature of a bank: whether its rows are trained."""
        return ~self.frozen[self.table_of[bank]]

    def update(self, work: Work, settings: Sequence[Setting], finite: bool = True) -> bool:
        """Backward's end: sum the gradients of every row and apply its optimizer once. Whether it was.

        settings: of their groups. finite: whether all gradients are; where those of any trainer are not, no rows change.
        """
        raised = np.zeros(len(self.schema.tables), np.bool_)
        for (bank, _), live in work.live.items():
            raised[self.table_of[bank][live]] = True
        if self.exchange is not None:
            finite = self._update_together(self.exchange, work, settings, raised, finite)
        elif finite:
            self.table_steps += raised
            for bank in self._raised(raised):
                self.caches[bank].changing(work.steps[bank].rows)
                update = self._of_backward(work, bank)
                update.scalars = self._scalars(bank, settings)
                self.banks[bank].update(update)
        work.updated = True
        work.grads.clear()
        work.joint.clear()
        work.apart.clear()
        return finite

    def _update_together(
        self, exchange: Exchange, work: Work, settings: Sequence[Setting], raised: np.ndarray, finite: bool
    ) -> bool:
        """Sums are made while trainers tell each other which tables have gradients, and sent when all have."""
        exchange.issue_early(self.banks)
        flags = exchange.begin_anywhere(np.append(raised, not finite))
        updates = {bank: self._summed(exchange, work, bank) for bank in self._raised(raised)}
        told = exchange.anywhere(flags)
        if told[-1]:
            return False
        self.table_steps += told[:-1]
        for bank in self._raised(told[:-1]):  # other trainers may have gradients where this one has none
            update, sent = updates.get(bank) or self._summed(exchange, work, bank)
            update.scalars = self._scalars(bank, settings)
            self.caches[bank].changing(work.steps[bank].rows)
            exchange.update(self.banks[bank], update, sent)
        return True

    def _summed(self, exchange: Exchange, work: Work, bank: int) -> tuple[Update, list[torch.Tensor]]:
        update = self._of_backward(work, bank)
        return update, exchange.sums(self.banks[bank], update)

    def _raised(self, raised: np.ndarray) -> list[int]:
        """The banks of tables with gradients."""
        return [bank for bank, members in enumerate(self.schema.banks) if raised[list(members.tables)].any()]

    def _scalars(self, bank: int, settings: Sequence[Setting]) -> np.ndarray:
        return self.optimizers.scalars(self.schema.banks[bank].tables, settings, self.table_steps, self.dtype)

    def _of_backward(self, work: Work, bank: int) -> Update:
        """What a backward brought, without its optimizer's numbers."""
        grads = work.joint.get(bank, work.grads.get((bank, 0)))
        if grads is None:  # other trainers have some
            grads = self.device.empty(0, self.schema.banks[bank].dim)
        none = np.empty((0, 0), self.dtype)
        return Update(work, grads, self._live(work, bank), none, self.counters.steps, work.apart.get(bank))

    def _live(self, work: Work, bank: int) -> np.ndarray:
        """Which rows of the output got a gradient: by feature where that is enough, else one by one."""
        features = len(self.schema.banks[bank].features)
        masks = [work.live.get((bank, m), np.zeros(features, np.bool_)) for m in range(len(work.micros))]
        if all(mask.all() for mask in masks):
            return np.ones(1, np.bool_)
        shared = any(m.ids[bank].shared is not None for m in work.micros)
        if self.pooled and not shared and all((mask == masks[0]).all() for mask in masks):
            return masks[0]
        return np.concatenate([m.ids[bank].by_bag(mask) for mask, m in zip(masks, work.micros, strict=True)])

    def flush(self) -> None:
        """Write every resident row to the store; all stay resident. Write-backs must be drained."""
        self.check()
        self.settle()
        for bank, cache in zip(self.banks, self.caches, strict=False):  # no caches before the first batch
            slots = np.flatnonzero(cache.key_of >= 0)
            for part in np.array_split(slots, max(1, len(slots) // 65536)):
                if len(part):
                    self.store.write(cache.key_of[part], bank.read(part))
                    self.begun.wrote(cache.key_of[part])
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
        self.caches = []
        self.capacity.forget()
        if (saved := self.capacity.saved_split(split)) is not None:
            self.allocate(saved)
        self.begun.begin(self.seen, self.store.held())
        self.table_steps[:] = table_steps
        self.counters = counters
        self.damage = None
