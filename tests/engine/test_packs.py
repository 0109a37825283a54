"""Packs: several variants whose rows are columns of one record have the bits of engines of their own."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skirl import FTRL, SGD, Adagrad, Adam, Constant, Normal, RowwiseAdagrad, Table, Uniform
from skirl.core.groups import Setting
from skirl.engine.access import peek, put_rows
from skirl.engine.engine import Engine
from skirl.engine.packs import Pack
from skirl.engine.work import State
from skirl.nn.current_step import StepByStep
from tests.cases import cases
from tests.streams import jagged

ROWS = {"a": 40, "b": 60, "c": 50}
RULES = [
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9),
    RowwiseAdagrad(lr=0.2, clip=0.5),
    Adagrad(lr=0.1, weight_decay=0.1),
    Adam(lr=0.05),
    FTRL(lr=0.1, l1=0.1),
]


@st.composite
def packs_of(draw, name):
    """Draw how to make a pack, so that it can be made twice."""
    dims = [draw(st.sampled_from([1, 3, 4, 16])) for _ in ROWS]
    inits = [draw(st.sampled_from([Uniform(0.5), Normal(0.1), Constant(0.3), None, "array"])) for _ in ROWS]
    numbers = np.random.default_rng(draw(st.integers(0, 9)))
    tables = [
        Table(
            table,
            rows,
            dim,
            init=numbers.random((rows, dim), np.float32) if init == "array" else init,
            features=("x", "y") if table == "b" else (),
        )
        for (table, rows), dim, init in zip(ROWS.items(), dims, inits)
    ]
    rule, seed = draw(st.sampled_from(RULES)), draw(st.integers(0, 3))
    by_table = draw(st.booleans())
    optimizer = {"a": draw(st.sampled_from(RULES)), "*": rule} if by_table else rule
    return lambda: Pack(tables, optimizer, seed, name)


class Run:
    def __init__(self, packs, **options) -> None:
        self.engine = Engine(
            packs, **{"cache": 40, "store": "memory", "dtype": torch.float32, "resume": False, **options}
        )
        self.alone = StepByStep(self.engine)
        self.seen: dict[str, list[bytes]] = {pack.name: [] for pack in packs}

    def step(self, number, batch) -> None:
        work = self.alone.step(self.engine.resolver.capture(batch))
        for pack in self.engine.packs:
            own = work.packs.get(pack.name, work)
            own.to(State.FORWARD)
            for bank, members in enumerate(pack.schema.banks):
                out = self.engine.banks[bank].pool(own, 0).clone()
                # Banks may be cut finer beside other packs: a feature's gradient depends on its name alone.
                parts = out.view(4, len(members.features), members.dim)
                grad = torch.empty_like(parts)
                for feature, of_feature in zip(members.features, grad.unbind(1)):
                    self.seen[pack.name].append((feature.name, parts[:, feature.column].numpy().tobytes()))
                    seed = hash_of(pack.name, number, feature.name)
                    of_feature[:] = torch.from_numpy(np.random.default_rng(seed).normal(size=of_feature.shape))
                    if number == 3 and feature.name == "c" and pack.name == "first":
                        of_feature[:] = torch.nan
                own.grads[bank, 0] = grad.view(-1, members.dim)
                own.live[bank, 0] = np.array([f.name != "y" or number % 2 == 0 for f in members.features])
            self.engine.update(own, [Setting(g.optimizer.lr, g.optimizer.weight_decay) for g in pack.optimizers.all])

    def rows(self, name):
        (pack,) = [pack for pack in self.engine.packs if pack.name == name]
        found = {}
        for bank, members in enumerate(pack.schema.banks):
            for t in members.tables:
                keys = np.arange(pack.tables[t].rows) | (t << 48)
                found[pack.tables[t].name] = peek(self.engine, keys, bank, pack.number).tobytes()
        return found, dict(zip(pack.optimizers.names, pack.steps.tolist())), sorted(self.seen[name])


def hash_of(*words) -> int:
    return int.from_bytes(repr(words).encode(), "big") % (1 << 63)


def compare(made, seed, steps=8, **options) -> None:
    rng = np.random.default_rng(seed)
    batches = [jagged(rng, {"a": 40, "x": 60, "y": 60, "c": 50}, 4) for _ in range(steps)]
    together = Run([make() for make in made], **options)
    alone = {pack.name: Run([pack]) for pack in (make() for make in made)}
    for run in (together, *alone.values()):
        for number, batch in enumerate(batches):
            run.step(number, batch)
        if len(run.engine.packs) > 1 or run is alone["second"]:  # rows of one variant are set, those of others stay
            (pack,) = [pack for pack in run.engine.packs if pack.name == "second"]
            values = np.full((3, pack.tables[1].dim), 0.25, np.float32)
            put_rows(run.engine, 1, np.array([0, 7, 59]), {"weight": values}, pack.number)
            run.alone.forget()
        for number, batch in enumerate(batches):
            run.step(steps + number, batch)
    assert together.engine.counters.fetched > 0
    for name, run in alone.items():
        assert together.rows(name) == run.rows(name), name
        assert run.engine.counters.steps == together.engine.counters.steps
    together.engine.drop_caches()  # all that was resident is in the store
    for name, run in alone.items():
        assert together.rows(name) == run.rows(name), name


@cases(60)
@given(packs_of("first"), packs_of("second"), packs_of("third"), st.integers(0, 99))
def test_packs_have_the_bits_of_lone_engines(first, second, third, seed) -> None:
    compare([first, second, third], seed)


@pytest.mark.parametrize("device", ["cpu", "interpret"])
def test_packs_on_disk_and_on_a_device(device, tmp_path) -> None:
    def pack(name, dim, rule, seed):
        return lambda: Pack(
            [Table(n, r, dim, features=("x", "y") if n == "b" else ()) for n, r in ROWS.items()], rule, seed, name
        )

    made = [
        pack("first", 16, Adam(lr=0.05), 0),
        pack("second", 3, RowwiseAdagrad(lr=0.1), 1),
        pack("third", 16, SGD(lr=1.0), 0),
    ]
    compare(made, 5, device=device, store=f"disk:{tmp_path}", steps=4 if device == "interpret" else 8)
