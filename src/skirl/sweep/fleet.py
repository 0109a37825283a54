"""One plan for several packs: lets the lookahead and its pipeline treat the engines of all variants as one."""

import threading
from collections.abc import Mapping, Sequence

from skirl.core.groups import Groups, RowOptimizers
from skirl.core.tables import Table
from skirl.engine.cache import Cache
from skirl.engine.capacity import CacheSize, CacheSplit, Capacity
from skirl.engine.engine import Engine, Leaving
from skirl.engine.work import Counters, Work
from skirl.oracle.seen import Seen


class Fleet:
    """Takes the place of an Engine, for several packs."""

    def __init__(self, engines: Mapping[str, Engine], cache: CacheSize) -> None:
        self.live = dict(engines)
        first = next(iter(engines.values()))
        self.rows = first.rows
        self.schema = first.schema
        self.packs = first.packs
        self.resolver = first.resolver
        self.seen = Seen(self.schema)
        """The rows that exist in any pack. A pack that has never had one of them creates it when it is first used."""
        for engine in engines.values():
            engine.first_values.among_others(engine.seen)
            engine.seen = self.seen
        self.know_rows()
        record_bytes = [
            sum(engine.held[bank] * engine.dtype.itemsize for engine in engines.values())
            for bank in range(len(self.schema.banks))
        ]
        self.capacity = Capacity.of(cache, self.schema, record_bytes, first.device.free_bytes)
        self.plans = 0
        self._locks = {name: threading.Lock() for name in engines}
        """Held while rows of a pack move, so that no pack leaves meanwhile."""

    @property
    def counters(self) -> Counters:
        return next(iter(self.live.values())).counters

    @property
    def caches(self) -> list[Cache]:
        return next(iter(self.live.values())).caches

    @property
    def damage(self) -> str | None:
        return next((engine.damage for engine in self.live.values() if engine.damage), None)

    def know_rows(self) -> None:
        self.seen.rebuild(())
        for engine in self.live.values():
            engine.first_values.tell(self.seen)

    def stands_for(self, other: Engine) -> bool:
        return any(other is engine for engine in self.live.values())

    def check(self) -> None:
        for engine in self.live.values():
            engine.check()

    def lose(self, what: str, cause: BaseException | None = None) -> None:
        for engine in self.live.values():
            engine.lose(what, cause)

    def leave(self, name: str) -> Engine:
        with self._locks[name]:
            engine = self.live.pop(name)
        engine.forget_moves()
        return engine

    # What the window and the pipeline call.

    def allocate(self, split: CacheSplit) -> None:
        for engine in self.live.values():
            engine.allocate(split)
        self.capacity.take(split)

    def drop_caches(self) -> None:
        for engine in self.live.values():
            engine.drop_caches()
        self.capacity.forget()

    def forget_split(self) -> None:
        """Prepare for a lookahead. Keep the caches as a checkpoint split them if all packs have the same split."""
        splits = [engine.capacity.split for engine in self.live.values()]
        if splits[0] is not None and all(split == splits[0] for split in splits):
            self.capacity.take(splits[0])
            return
        for engine, split in zip(self.live.values(), splits, strict=True):
            if split is not None:
                engine.drop_caches()
        self.capacity.forget()

    def forget_moves(self) -> None:
        for engine in self.live.values():
            engine.forget_moves()

    def fetch(self, work: Work) -> None:
        self.plans += 1
        for name in list(self.live):
            with self._locks[name]:
                engine = self.live.get(name)
                if engine is not None:
                    work.packs[name] = own = work.own()
                    engine.fetch(own)

    def load(self, work: Work) -> Leaving:
        left = {name: engine.load(work.packs[name]) for name, engine in self.live.items()}
        return [
            (step.evict_keys, {name: leaving[bank][1] for name, leaving in left.items()})
            for bank, step in enumerate(work.steps)
        ]

    def write(self, leaving: Leaving) -> None:
        for name in leaving[0][1]:
            engine = self.live.get(name)
            if engine is not None:
                engine.write([(keys, records[name]) for keys, records in leaving])

    def gather(self, work: Work) -> None: ...


def shared_banks(all_tables: Sequence[Sequence[Table]], optimizers: Sequence[RowOptimizers]) -> list[tuple[int, ...]]:
    """Return the tables of each bank of the plan: two tables share a bank if they do so in every pack."""
    kinds = [
        [(table.dim, *record) for table, record in zip(tables, Groups(tables, rule).records, strict=True)]
        for tables, rule in zip(all_tables, optimizers, strict=True)
    ]
    of_each = list(zip(*kinds, strict=True))
    return [tuple(t for t, other in enumerate(of_each) if other == kind) for kind in dict.fromkeys(of_each)]
