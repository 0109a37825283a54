"""One plan, several packs: the engines of all variants in the place of one, for the lookahead and its pipeline."""

import threading
from collections.abc import Mapping, Sequence
from copy import copy

from skirl.core.groups import Groups, RowOptimizers
from skirl.core.ids import Captured, Resolver
from skirl.core.positions import Positions
from skirl.core.tables import Table
from skirl.engine.cache import Cache
from skirl.engine.capacity import CacheSize, Capacity, Split
from skirl.engine.counters import Counters
from skirl.engine.engine import Engine, Leaving
from skirl.engine.work import Micro, Work
from skirl.oracle.seen import Seen


class Counting(Resolver):
    """A resolver that counts the batches that pass it, and their ids."""

    batches = 0
    ids = 0

    def positions(self, captured: Captured) -> list[Positions]:
        """Check every id, once for all packs."""
        object.__setattr__(self, "batches", self.batches + 1)
        object.__setattr__(self, "ids", self.ids + len(captured.values))
        return super().positions(captured)


class Fleet:
    """The engines of all packs, where one Engine stands otherwise.

    **Arguments**

    - `engines`: of each pack by its name; their banks have the same tables, in the same order.
    - `cache`: what all packs take together: bytes of all, or rows of each.
    """

    exchange = None

    def __init__(self, engines: Mapping[str, Engine], cache: CacheSize) -> None:
        self.live = dict(engines)
        """The packs that are still there."""
        first = next(iter(engines.values()))
        self.schema = first.schema
        self.seed = first.seed
        self.resolver = Counting(*(getattr(first.resolver, name) for name in ("schema", "dtype", "pooled")))
        self.seen = Seen(self.schema)
        """Which rows exist in any pack: in one that has never had a row, it begins when it first comes."""
        for engine in engines.values():
            engine.begun.among_others(engine.seen)
            engine.seen = self.seen
        self.know_rows()
        record_bytes = [
            sum(engine.held[bank] * engine.dtype.itemsize for engine in engines.values())
            for bank in range(len(self.schema.banks))
        ]
        self.capacity = Capacity(cache, self.schema, record_bytes, first.device.free_bytes)
        self.plans = 0
        """Steps that were planned and brought."""
        self._locks = {name: threading.Lock() for name in engines}
        """Held while rows of a pack move, so that none leaves in the middle of it."""

    @property
    def counters(self) -> Counters:
        """Those of the first pack: all have moved the same rows."""
        return next(iter(self.live.values())).counters

    @property
    def caches(self) -> list[Cache]:
        """Those of the first pack: all have the same rows in the same slots."""
        return next(iter(self.live.values())).caches

    @property
    def damage(self) -> str | None:
        """What was lost, if anything was."""
        return next((engine.damage for engine in self.live.values() if engine.damage), None)

    def know_rows(self) -> None:
        """Packs have other rows than before: no step is on its way, and no row in a cache."""
        self.seen.rebuild(())
        for engine in self.live.values():
            engine.begun.tell(self.seen)

    def stands_for(self, other: Engine) -> bool:
        """Whether these are the rows of a pack."""
        return any(other is engine for engine in self.live.values())

    def check(self) -> None:
        """Refuse to go on when rows of a pack were lost."""
        for engine in self.live.values():
            engine.check()

    def lose(self, what: str, cause: BaseException | None = None) -> None:
        """Rows are lost, or one pack has a step more or less than another."""
        for engine in self.live.values():
            engine.lose(what, cause)

    def leave(self, name: str) -> Engine:
        """A pack is not part of the plan any more; rows that were on their way to it are let go."""
        with self._locks[name]:
            engine = self.live.pop(name)
        engine.forget_moves()
        return engine

    # What the window and the pipeline call.

    def allocate(self, split: Split) -> None:
        """Allocate the caches of all packs: as many slots for each."""
        for engine in self.live.values():
            engine.allocate(split)
        self.capacity.take(split)

    def split_anew(self, split: Split) -> None:
        """Begin with empty caches, split otherwise."""
        for engine in self.live.values():
            engine.split_anew(split)
        self.capacity.take(split)

    def forget_split(self) -> None:
        """A lookahead begins. Caches that a checkpoint has split are kept where all packs have the same."""
        splits = [engine.capacity.split for engine in self.live.values()]
        if splits[0] is not None and all(split == splits[0] for split in splits):
            self.capacity.take(splits[0])
            return
        for engine, split in zip(self.live.values(), splits, strict=True):
            if split is not None:
                engine.drop_caches()
        self.capacity.forget()

    def forget_moves(self) -> None:
        """Nothing will be forwarded any more."""
        for engine in self.live.values():
            engine.forget_moves()

    def fetch(self, work: Work) -> None:
        """Read the rows of a step, of each pack from its own store."""
        self.plans += 1
        for name in list(self.live):
            with self._locks[name]:
                engine = self.live.get(name)
                if engine is not None:
                    work.packs[name] = own = _own(work)
                    engine.fetch(own)

    def load(self, work: Work) -> Leaving:
        """Make the rows of a step resident in each pack; of what left, each pack knows its records."""
        left = {name: engine.load(work.packs[name]) for name, engine in self.live.items()}
        return [
            (step.evict_keys, {name: leaving[bank][1] for name, leaving in left.items()})
            for bank, step in enumerate(work.steps)
        ]

    def write(self, leaving: Leaving) -> None:
        """Write what left the caches in one step, of each pack to its own store."""
        for name in leaving[0][1]:
            engine = self.live.get(name)
            if engine is not None:
                engine.write([(keys, records[name]) for keys, records in leaving])

    def bring_values(self, work: Work) -> None:
        """There is one trainer: the rows are here."""

    def settle(self) -> None:
        """There is one trainer."""

    def give_up(self) -> None:
        """There is one trainer."""


def _own(work: Work) -> Work:
    """A pack's part of a step: the same Steps and ids, and room for what is its own."""
    micros = [Micro(micro.captured, micro.positions, [copy(ids) for ids in micro.ids]) for micro in work.micros]
    return Work(work.number, micros, work.steps, shards=work.shards, mine=work.mine)


def shared_banks(all_tables: Sequence[Sequence[Table]], optimizers: Sequence[RowOptimizers]) -> list[tuple[int, ...]]:
    """The tables of each bank of all packs: two share one where they do in every pack.

    **Arguments**

    - `all_tables`: of each pack, alike but for dims and initial values.
    - `optimizers`: of each pack.

    >>> from skirl import SGD, Adam, Table
    >>> def tables(*dims):
    ...     return [Table(name, 9, dim) for name, dim in zip("abc", dims)]
    >>> shared_banks([tables(4, 4, 4), tables(4, 8, 8)], [SGD(), {"c": Adam(), "*": SGD()}])
    [(0,), (1,), (2,)]
    >>> shared_banks([tables(4, 4, 4), tables(8, 4, 8)], [SGD(), SGD()])
    [(0, 2), (1,)]
    """
    kinds = [
        [(table.dim, *record) for table, record in zip(tables, Groups(tables, rule).records, strict=True)]
        for tables, rule in zip(all_tables, optimizers, strict=True)
    ]
    of_each = list(zip(*kinds, strict=True))
    return [tuple(t for t, other in enumerate(of_each) if other == kind) for kind in dict.fromkeys(of_each)]
