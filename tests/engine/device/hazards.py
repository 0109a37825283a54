"""The stages of a GPU's cache in one thread, in random order, over streams that lag behind at random."""

from collections.abc import Callable

import numpy as np
import torch

from skirl import SGD, KeyedJagged, Table
from skirl.core.initial import first_rows
from skirl.core.optim import padded
from skirl.engine.device.gpu import Gpu, GpuRows
from skirl.engine.device.transfers import Block
from skirl.engine.engine import Engine
from skirl.engine.work import Work
from skirl.oracle.options import Plan
from skirl.oracle.planner import Planner, bank_planners
from tests.engine.device.lazy import World

TABLE = Table("a", 400, 3)
LR = 0.5


class Stages:
    """A run of `steps` steps."""

    def __init__(self, seed: int, *, eager: float, prefetch: int, steps: int = 40, universe: int = 40) -> None:
        self.rng = np.random.default_rng([seed, 5])
        self.world = World(seed, eager)
        self.engine = engine = Engine(
            [TABLE], optimizer=SGD(lr=LR), cache=10, store="memory", dtype=torch.float32, seed=seed, resume=False,
            device="interpret",
        )  # fmt: skip
        device = engine.device
        assert isinstance(device, Gpu)
        device.streams = self.world.streams()
        engine.banks = engine._open_banks()
        (self.bank,) = engine.banks
        assert isinstance(self.bank, GpuRows)
        for blocks in (self.bank.blocks, self.bank.plans):
            blocks.choose = lambda fits: fits[-1]
        self.bank.blocks.take = poisoned(self.bank.blocks.take)
        plan = Plan(depth=3, prefetch=prefetch)
        engine.allocate(engine.capacity.decide([[8]], [10], in_flight=2 * plan.hold, number=0))
        planner = Planner(bank_planners(engine.schema, [10], plan, engine.seen, hold_rows=engine.capacity.halves), plan)
        self.works: list[Work] = []
        for _ in range(steps):
            ids = torch.from_numpy(self.rng.integers(0, universe, (8, 1)))
            micro = engine.resolver.resolve(
                engine.resolver.check(engine.resolver.capture(KeyedJagged.one_hot(["a"], ids)))
            )
            planner.add(None, micro.positions, 0)
            self.works.append(Work([micro], len(self.works)))
        planner.end()
        for work in self.works:
            work.steps = (planner.next() or (None, []))[1]
            planner.executed(max(0, work.number - prefetch))
        self.prefetch = prefetch
        self.rows: dict[int, np.ndarray] = {}
        self.fetching = self.loading = 0
        self.written = -1
        self.arrival = None
        self.stage = ["arrive", "load"]
        self.leaving: list[tuple[int, list]] = []

    def go(self) -> int:
        """Run until all steps are done, and return how many rows were read from the store."""
        fetched = 0
        haste = np.ones(3)
        while self.loading < len(self.works):
            if self.rng.random() < 0.3:  # now and then another stage becomes fast
                haste = self.rng.exponential(size=3) ** 3
            turns = list(self.turns())
            likely = (haste + 1e-9) * [turn is not None for turn in turns]
            turn = turns[self.rng.choice(3, p=likely / likely.sum())]
            assert turn is not None
            fetched += turn()
        return fetched

    def turns(self):
        """Yield, for each stage, its next action, or None if it may not act."""
        yield self.fetch if self.may_fetch() else None
        yield self.compute if self.stage[1] != "load" or self.fetching > self.loading else None
        yield self.write if self.leaving else None

    def may_fetch(self) -> bool:
        if self.stage[0] != "arrive":
            return True
        if self.fetching == len(self.works) or self.fetching - self.loading > self.prefetch:
            return False
        return self.written >= self.works[self.fetching].steps[0].fetch_after

    def fetch(self) -> int:
        work = self.works[self.fetching]
        keys = work.steps[0].fetch_keys
        if self.stage[0] == "arrive":
            self.arrival = self.bank.arriving(work)
            self.stage[0] = "read"
        elif self.stage[0] == "read":
            assert not len(keys) or self.engine.store.read(keys, self.bank.room(self.arrival)).all()
            self.stage[0] = "ship"
            return len(keys)
        else:
            self.bank.shipped(self.arrival, work)
            work.fetched, work.found = [self.arrival], [len(keys)]
            self.stage[0] = "arrive"
            self.fetching += 1
        return 0

    def compute(self) -> int:
        work = self.works[self.loading]
        ids = work.micros[0].values
        if self.stage[1] == "load":
            self.leaving.append((work.number, self.engine.load(work)))
            self.stage[1] = "pool"
        elif self.stage[1] == "pool":
            out = self.bank.pool(work, 0).numpy()
            np.testing.assert_array_equal(out, [self.row(i) for i in ids], f"output of step {work.number}")
            self.stage[1] = "update"
        else:
            grads = torch.from_numpy(self.rng.standard_normal((len(ids), TABLE.dim)).astype(np.float32))
            scalars = padded([(np.inf, 0, LR)], np.float32)
            work.grads[0, 0], work.live[0, 0] = grads, np.ones(1, np.bool_)
            self.bank.update(work, scalars, 0)
            sums = {}
            for i, grad in zip(ids.tolist(), grads.numpy()):
                sums[i] = sums.get(i, np.zeros(TABLE.dim, np.float32)) + grad
            for i, total in sums.items():
                self.rows[i] = self.row(i) - np.float32(LR) * total
            self.stage[1] = "load"
            self.loading += 1
        return 0

    def write(self) -> int:
        number, leaving = self.leaving.pop(0)
        self.engine.write(leaving)
        self.written = number
        return 0

    def row(self, i: int) -> np.ndarray:
        i = int(i)
        if i not in self.rows:
            self.rows[i] = first_rows([i], TABLE.initial, TABLE.dim, self.engine.seed)[0]
        return self.rows[i]


def poisoned(take: Callable[[int], Block]) -> Callable[[int], Block]:
    """Fill new memory with NaN, so that reading a row before it arrives shows."""

    def taken(nbytes: int) -> Block:
        block = take(nbytes)
        if block.copied is None:
            block.host.fill_(0xFF)
            block.device.fill_(0xFF)
        return block

    return taken


def hazards(seeds: range) -> int:
    """Run many short runs, and return how many rows were fetched."""
    fetched = 0
    for seed in seeds:
        fetched += Stages(seed, eager=(0.0, 0.4, 0.8)[seed % 3], prefetch=(2, 5)[seed % 2]).go()
    return fetched
