"""The rows of one collection: its cache, its store, its optimizer, and the moves between them that a Step asks for."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from skirl.core.groups import Setting
from skirl.core.ids import Resolver
from skirl.core.initial import fill
from skirl.core.keys import row_of, table_of
from skirl.engine.cache import Cache
from skirl.engine.capacity import CacheSize, CacheSplit, Capacity
from skirl.engine.device import HALVES, BankFacts, BankRows, open_device, packed, torch_device
from skirl.engine.first_values import FirstValues
from skirl.engine.packs import Pack, placed
from skirl.engine.rows import open_rows
from skirl.engine.work import Counters, State, Work
from skirl.oracle.seen import Seen
from skirl.peers.processes import launched_here
from skirl.store import Record, Store, open_store, own_part
from skirl.tools.os_errors import why
from skirl.tools.threads import run

log = logging.getLogger("skirl")

_DTYPES = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}

Opening = Callable[[Mapping[int, Record], Mapping[int, int]], Store]
"""Opens a store for records of tables, given their numbers of rows too."""
Leaving = list[tuple[np.ndarray, Any]]
"""Rows that left the cache in one step: for each bank, their keys and its handle for their records."""


class Damaged(RuntimeError):
    """Rows were lost on the way. The message says how, and what to do."""


class Engine:
    def __init__(
        self,
        packs: Sequence[Pack],
        *,
        cache: CacheSize,
        store: "str | Store | Opening",
        dtype: torch.dtype,
        resume: bool,
        pooled: bool = True,
        device: str | torch.device = "cpu",
        placement: Mapping[str, int | Mapping[int, int]] | None = None,
    ) -> None:
        if dtype not in (*_DTYPES, *HALVES):
            raise ValueError(
                f"dtype is {dtype}: set it to torch.float32 or torch.float64, or on a GPU to torch.bfloat16 or torch.float16"
            )
        if dtype in HALVES and str(device) == "cpu" and store != "checkpoint":  # which is only read
            raise ValueError(f"rows of {dtype} can only be trained on a GPU: set device='cuda', or dtype=torch.float32")
        self.packs = packs
        own = packs[0]
        self.rows = open_rows(
            torch_device(device), own.tables, own.optimizers, placement if pooled else None, dtype in HALVES
        )
        """This trainer's rows, or those that it shares with others."""
        self.schema = placed(packs, dtype, whole=self.rows.whole, rank=self.rows.peers.rank)
        """What the plan needs: its dims are those of the first pack."""
        self.torch_dtype = dtype
        self.half = dtype if dtype in HALVES else None
        """Dtype that rows are held in, if computation uses another one."""
        self.dtype = _DTYPES[torch.float32 if self.half else dtype]
        """Dtype of computation, and of rows that are given out."""
        self.pooled = pooled
        self.device = open_device(device, self.dtype)
        self.resolver = Resolver(self.schema, self.dtype, pooled)
        if isinstance(store, str):
            several = launched_here() or not self.rows.local
            store = own_part(store, self.rows.peers.rank, among_others=several, cut=self.rows.cut)
        peers, free = self.rows.peers, self.device.free_bytes
        rows = [sum(own.tables[t].rows for t in bank.tables) for bank in self.schema.banks]
        self.capacity = Capacity(cache, rows, self.record_bytes, lambda: free() // peers.near, peers.size)
        self._opening: Opening = (
            store if callable(store) else lambda records, rows: open_store(store, records, rows=rows)
        )
        self.store = self._opened()
        self.seen = Seen(self.schema)
        try:
            if len(self.store) and not resume:
                raise ValueError(
                    f"the store {self.store!r} already holds {len(self.store)} rows: pass resume=True to go on with them "
                    "(on the command line: --resume and --save), or begin with an empty one: another folder, which a node "
                    "is given as its --store"
                )
            self.first_values = FirstValues(self.schema, packs, str(dtype).removeprefix("torch."))
            """Rows that exist and are not in the store."""
            self.first_values.check_store(self.store, packs)
            self.first_values.begin(self.seen, self.store.held() if len(self.store) else ())
        except BaseException:
            if self.store is not store:
                self.store.close()  # opened here; a second try must find it free
            raise
        self.caches: list[Cache] = []
        self.counters = Counters()
        self._counting = threading.Lock()
        self.saving: Any = None
        self.damage: str | None = None
        """Text of the error that every later use raises: what happened and what to do."""
        self._cause: BaseException | None = None
        self._goes_on = resume and self.store.durable and not len(self.store)
        """True if rows are to go on from a store that has none, and no checkpoint was loaded yet."""
        self.banks = self._open_banks()
        """One for each bank, which holds its part of the cache and computes on it."""
        self._pid = os.getpid()

    def _open_banks(self) -> list[BankRows]:
        banks = []
        for i, (width, bank) in enumerate(zip(self.held, self.schema.banks, strict=True)):
            packs, features = tuple(pack.columns[i] for pack in self.packs), len(bank.features) if self.pooled else 1
            banks.append(self.device.bank(BankFacts(i, width, packs, features, self.dtype, self.half)))
        return banks

    @property
    def held(self) -> list[int]:
        """By bank: numbers in a record, as the store has it."""
        return [sum(pack.held[bank] for pack in self.packs) for bank in range(len(self.schema.banks))]

    @property
    def record_bytes(self) -> list[int]:
        return [width * self.dtype.itemsize for width in self.held]

    def _opened(self) -> Store:
        held, banks = self.held, self.schema.banks
        records = {t: Record(held[i], self.dtype) for i, bank in enumerate(banks) for t in bank.tables}
        return self._opening(records, {t: table.rows for t, table in enumerate(self.schema.tables)})

    def check(self) -> None:
        """Raise if rows were lost, after `close`, or in a forked child."""
        if self.damage:
            raise Damaged(self.damage) from self._cause
        self.check_process()
        if self.store.closed:
            raise RuntimeError(
                "these embeddings are closed: make new ones, with resume=True if the store has kept its rows"
            )

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this process is a fork of the one that made the embeddings: rows move by threads, which a fork does not "
                "inherit. Make the embeddings in the child, or start it with the 'spawn' method"
            )

    def lose(self, what: str, cause: BaseException | None = None) -> None:
        """Record that rows are lost: from now on, every use raises this sentence. Only the first loss is recorded."""
        if self.damage is None:
            then = "" if "resume" in what else ". Make new embeddings and resume from a checkpoint"
            self.damage, self._cause = what.rstrip(".") + then, cause

    def forget_split(self) -> None:
        """Drop a split that a batch looked up alone has decided, or one for variants that have left."""
        if self.capacity.by_one or any(pack.left for pack in self.packs):
            self.drop_caches()

    def allocate(self, split: CacheSplit) -> None:
        if self._goes_on:
            self._goes_on = False
            log.warning("%r holds no rows to go on with: all rows begin at their initial values", self.store)
        self.caches = [
            Cache(bank.allocate(n, staging))
            for bank, n, staging in zip(self.banks, split.slots, split.staging_rows, strict=True)
        ]
        self.capacity.take(split)

    def drop_caches(self) -> None:
        """Write all resident rows to the store; the next batches decide on new caches. Write-backs must be drained."""
        with self._losing("splitting the cache again failed"):
            self.flush()
            if any(pack.left for pack in self.packs):
                self._narrow()
        self._open_anew()

    def _open_anew(self) -> None:
        self.forget_moves()
        self.release()  # the old caches go before the new ones are made: a device has no room for both
        self.banks = self._open_banks()

    def _narrow(self) -> None:
        """Move all rows to a new store, without the columns of packs that have left."""
        old, stay = self.store, [pack for pack in self.packs if not pack.left]
        was = self.held
        kept = [np.concatenate([np.arange(n)[pack.own(bank)] for pack in stay]) for bank, n in enumerate(was)]
        self.packs = stay
        placed(stay, self.torch_dtype, self.schema)
        self.store = self._opened()
        self.first_values.check_store(self.store, stay)
        for keys in old.held():
            for bank, part in enumerate(self.by_bank(keys)):
                records = np.empty((len(part), was[bank]), self.dtype)
                if len(part):
                    old.read(part, records)
                    self.store.write(part, np.ascontiguousarray(records[:, kept[bank]]))
        old.close(flush=False)
        self.capacity.record_bytes = self.record_bytes

    @property
    def touched(self) -> int:
        """How many rows exist that count here, so that trainers' sum is that of one process."""
        return len(self.seen) - sum(self.seen.of(t) for t in self.rows.whole if not self.rows.counts(t))

    def by_bank(self, keys: np.ndarray) -> list[np.ndarray]:
        table = table_of(keys)
        return [keys[np.isin(table, bank.tables)] for bank in self.schema.banks]

    def empty(self) -> None:
        """Drop all rows, of all packs: others are about to come."""
        self._open_anew()
        self.store.close(flush=False)
        self.store = self._opened()
        self.first_values.check_store(self.store, self.packs)
        self.first_values.begin(self.seen, ())
        self._goes_on, self.damage = False, None

    def release(self) -> None:
        self.banks, self.caches = [], []
        self.capacity.forget()

    def load(self, work: Work) -> Leaving:
        """Make a step's rows resident: evict, forward, put fetched rows, make new ones. Return the rows that left."""
        with self._losing(f"step {work.number} failed while its rows were being moved"):
            leaving = [self._load_bank(bank, work) for bank in range(len(work.steps))]
        work.fetched = []
        if self.packs[0].name:
            work.packs = {pack.name: work.own(n) for n, pack in enumerate(self.packs) if not pack.left}
        self.counters.steps += 1
        return leaving

    @contextmanager
    def _losing(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.lose(f"{what}: {why(error)}", error)
            raise

    def _load_bank(self, bank: int, work: Work) -> tuple[np.ndarray, Any]:
        cache, step = self.caches[bank], work.steps[bank]
        cache.changing(step.evict_slots)
        leaving = self.banks[bank].load(work.of(bank), work.fetched[bank])
        found = work.found[bank]
        made = len(step.fetch_keys) - found  # begun here: no store has had them
        came = [
            (step.fetch_keys, step.fetch_slots, not made),
            (step.forward_keys, step.forward_slots, True),  # as they were written back
            (step.new_keys, step.new_slots, False),
        ]
        cache.record(step.evict_slots, came, step.rows)
        self.counters.fetched += found + len(step.forward_keys)
        self.counters.forwarded += len(step.forward_keys)
        self.counters.new += len(step.new_keys) + made
        self.counters.bytes_read += found * self.record_bytes[bank]
        return step.evict_keys, leaving

    def fetch(self, work: Work) -> None:
        for bank, step in zip(self.banks, work.steps, strict=True):
            own = work.of(bank.facts.number)
            (arrival, room), count = bank.arriving(own), 0
            if len(step.fetch_keys):
                found = self.store.read(step.fetch_keys, room)
                count = int(np.count_nonzero(found))
                if count < len(found):  # rows of arrays
                    new = step.fetch_keys[~found]
                    self.check_new(new)
                    room[~found] = self.begin(bank.facts.number, new)
            bank.shipped(arrival, own)
            work.fetched.append(arrival)
            work.found.append(count)

    def begin(self, bank: int, keys: np.ndarray) -> np.ndarray:
        """Return the first records of some rows, of all packs."""
        records = np.empty((len(keys), self.held[bank]), self.dtype)
        places = np.arange(len(keys), dtype=np.int32)
        for pack in self.packs:
            rows = np.empty((len(keys), pack.widths[bank]), self.dtype)
            own = pack.columns[bank]
            run(fill, len(keys), keys, places, rows, own.first, *own.filling, threads=torch.get_num_threads())
            self.first_values.give(pack, bank, keys, rows)
            records[:, pack.own(bank)] = packed(rows, self.half) if self.half else rows
        return records

    def check_new(self, keys: np.ndarray) -> None:
        """Raise if the store has had one of these rows, which it lacks."""
        new = self.first_values.new(keys)
        if not new.all():
            key = keys[np.argmin(new)]
            raise Damaged(
                f"row {row_of(key)} of table {self.schema.tables[table_of(key)].name!r} was trained before and is not in "
                f"the store {self.store!r}: the store was changed by someone else; resume from a checkpoint"
            )

    def write(self, leaving: Leaving) -> None:
        for bank, (keys, rows) in zip(self.banks, leaving, strict=True):
            if len(keys):
                with self._losing(f"{len(keys)} rows that left the cache could not be written"):
                    records = bank.landed(rows)
                    taken = self.store.write(keys, records)
                with self._counting:  # two threads write
                    self.first_values.wrote(keys)
                    self.counters.written += taken
                    self.counters.bytes_written += taken * records.itemsize * records.shape[1]
            bank.written(rows)

    def forget_moves(self) -> None:
        for bank in self.banks:
            bank.forget_moves()

    def update(self, work: Work, settings: Sequence[Setting], finite: bool = True) -> bool:
        """Sum the gradients of every row and apply its optimizer once, unless any trainer's are not finite."""
        pack = self.packs[work.pack]
        raised = np.zeros(len(self.schema.tables), np.bool_)
        for (bank, _), live in work.live.items():
            raised[pack.table_of[bank][live]] = True
        applied = self.rows.apply(self, work, raised, settings, finite)
        work.state = State.APPLIED
        work.grads.clear()
        work.joint.clear()
        return applied

    def flush(self) -> None:
        """Write resident rows that the store lacks as they are. All stay resident. Write-backs must be drained."""
        self.check()
        for bank, cache in zip(self.banks, self.caches, strict=False):  # no caches before the first batch
            slots = cache.unwritten
            for part in np.array_split(slots, max(1, len(slots) // 65536)):
                if len(part):
                    self.store.write(cache.key_of[part], bank.read(part))
                    self.first_values.wrote(cache.key_of[part])
                    cache.written(part)
        self.store.flush()

    def restore(self, thaw: Callable[[], None], *, table_steps: Sequence[int], counters: Counters) -> None:
        """Replace all rows with those that `thaw` gives the store. No lookahead may be iterating."""
        self.check_process()
        thaw()  # from here on nothing is expected to fail
        self._goes_on = False
        self.damage = "an error came while rows were being restored: load the checkpoint again"
        self._open_anew()
        self.first_values.begin(self.seen, self.store.held())
        self.packs[0].steps[:] = table_steps
        self.counters = counters
        self.damage = None
