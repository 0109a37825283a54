"""Variants of a sweep leave behind the bits of their lone runs, whatever the others are; and what is refused."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl import FTRL, SGD, Adagrad, Adam, RowwiseAdagrad
from skirl.core import ids
from skirl.oracle.bank import BankPlanner
from skirl.pipeline.reader import Reader
from tests.cases import cases
from tests.sweep.runs import Case, Of, check, in_sweep

MIXED = (
    Of(),
    Of(lr=0.5, rule=Adam(), seed=3),
    Of(dim=6, rule=Adagrad(), width=8, dropout=0.5),
    Of(rule={"a": RowwiseAdagrad(), "*": SGD(momentum=0.9)}, dropout=0.3, only=("x", "b"), dropped=5),
    Of(lr=0.0, norm=True, seed=1),
    Of(nan=3),
)


@pytest.mark.parametrize("own_loop", [True, False])
def test_a_loop_of_ones_own(own_loop):
    check(Case(MIXED, own_loop=own_loop))


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_lanes(kind, tmp_path):
    sweep = check(Case(MIXED, form="lanes", steps=14, nap=0.003, kind=kind, folder=tmp_path, slots=48))
    assert [v.draws for v in sweep.variants] == [False, False, True, True, False, False]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("skirl-lane")]


RULES = (SGD(), SGD(momentum=0.9), Adagrad(), Adam(), RowwiseAdagrad(), FTRL(), {"a": Adam(), "*": SGD()})


@st.composite
def variants(draw: st.DrawFn) -> Of:
    """One variant: most are plain, for these may be in lanes."""
    features = draw(st.sampled_from([("x", "y", "b", "c"), ("x", "b"), ("c", "y")]))
    return Of(
        dim=draw(st.sampled_from([None, None, 2, 6])),
        lr=draw(st.sampled_from([0.1, 0.0, 0.3])),
        rule=draw(st.sampled_from(RULES)),
        seed=draw(st.integers(0, 2)),
        width=draw(st.sampled_from([4, 7])),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.5])),
        norm=draw(st.booleans()),
        only=features,
        nan=draw(st.sampled_from([None, None, None, 3])),
        dropped=draw(st.sampled_from([None, None, None, 3, 5])),
    )


@pytest.mark.timeout(3600)
@cases(15)
@given(data=st.data())
def test_bits_are_those_of_lone_runs(data):
    case = Case(
        tuple(data.draw(st.lists(variants(), min_size=1, max_size=4))),
        seed=data.draw(st.integers(0, 1 << 20)),
        steps=data.draw(st.integers(4, 10)),
        form=data.draw(st.sampled_from(["loop", "lanes", "auto"])),
        slots=data.draw(st.sampled_from([34, 48, 200])),
        nap=data.draw(st.sampled_from([0.0, 0.002])),
        depth=data.draw(st.sampled_from([1, 4, "auto", "epoch"])),
        prefetch=data.draw(st.sampled_from([0, 2])),
        own_loop=data.draw(st.booleans()),
        accumulate=data.draw(st.sampled_from([1, 1, 1, 2])),
    )
    check(case)


def test_one_reader_one_hash_one_plan(monkeypatch):
    """As much is read, hashed and planned for many variants as for one."""
    counts = dict.fromkeys(("read", "checked", "planned"), 0)

    def counted(owner, name, what):
        inner = getattr(owner, name)

        def call(*args, **options):
            counts[what] += 1
            return inner(*args, **options)

        monkeypatch.setattr(owner, name, call)

    counted(Reader, "_take", "read")
    counted(ids, "positions_of", "checked")
    counted(BankPlanner, "plan", "planned")
    found = []
    for number in (1, 5):
        _, sweep = in_sweep(Case((Of(),) * number, steps=6))
        found.append(dict(counts))
        counts.update(dict.fromkeys(counts, 0))
        assert (sweep.read_batches, sweep.plans) == (6, 6)
    assert found[0] == found[1] == {"read": 6, "checked": 12, "planned": 12}


def test_the_cache_is_given_back_when_a_variant_leaves():
    _, sweep = in_sweep(Case((Of(dropped=3), Of(), Of())))
    left = sweep["v0"].embeddings.engine
    assert (left.banks, left.caches, left.store.closed) == ([], [], True)
    assert len(sweep) == 2 and sweep["v0"].left == "dropped"
