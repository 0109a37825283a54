"""Variants of a sweep leave the bits of their lone runs, whatever the others are; and what is refused."""

import gc
import zlib
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import ref

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from skirl import FTRL, SGD, Adagrad, Adam, Constant, Normal, RowwiseAdagrad
from skirl.core import ids
from skirl.oracle.bank import BankPlanner
from skirl.pipeline.reader import Reader
from tests.sweep.runs import Case, Of, check, in_sweep, make

MIXED = (
    Of(),
    Of(lr=0.5, rule=Adam(), seed=3, only=("c", "y")),  # rows of x have no gradient, so their moments stay
    Of(dim=8, rule=Adagrad(), width=8, dropout=0.5),
    Of(rule={"a": RowwiseAdagrad(), "*": SGD(momentum=0.9)}, dropout=0.3, only=("x", "b"), dropped=5),
    Of(lr=0.0, norm=True, seed=1),
    Of(nan=3),
    Of(dropout=0.2, noise=0.1, seed=2),
    Of(rule=Adam(), warm=True),
)


def test_on_disk(tmp_path):
    check(Case(MIXED, steps=14, kind="disk", folder=tmp_path, slots=48))


def test_with_the_kernels_of_a_gpu():
    check(Case((MIXED[0], MIXED[2], MIXED[7]), steps=4, slots=34, device="interpret"), plain=False)


@pytest.mark.parametrize(("when", "kind"), [("trains", "disk"), ("saves", "memory"), ("all", "disk")])
def test_killed_and_gone_on_with(when, kind, tmp_path):
    check(Case(MIXED, resumed=4, killed=when, kind=kind, folder=tmp_path), plain=False)


RULES = (SGD(), SGD(momentum=0.9), Adagrad(), Adam(), RowwiseAdagrad(), FTRL(), {"a": Adam(), "*": SGD()})


@st.composite
def variants(draw: st.DrawFn) -> Of:
    """Draw a variant, mostly a plain one."""
    features = draw(st.sampled_from([("x", "y", "b", "c"), ("x", "b"), ("c", "y")]))
    rule = draw(st.sampled_from(RULES))
    return Of(
        dim=draw(st.sampled_from([None, None, 2, 8])),
        lr=draw(st.sampled_from([0.1, 0.3] if rule == FTRL() else [0.1, 0.0, 0.3])),  # its rows are made of it
        rule=rule,
        seed=draw(st.integers(0, 2)),
        width=draw(st.sampled_from([4, 7])),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.5])),
        noise=draw(st.sampled_from([0.0, 0.0, 0.0, 0.1])),
        norm=draw(st.booleans()),
        only=features,
        nan=draw(st.sampled_from([None, None, None, 3])),
        dropped=draw(st.sampled_from([None, None, 1, 3, 5])),
        warm=draw(st.sampled_from([False, False, True])),
        init=draw(st.sampled_from([None, None, Normal(0.1), Constant(0.3)])),
    )


@st.composite
def cases_of(draw: st.DrawFn, folder: Path) -> Case:
    accumulate = draw(st.sampled_from([1, 1, 1, 1, 2]))
    steps = draw(st.integers(4, 10))
    resumed = draw(st.sampled_from([None, steps // 2, steps - 2])) if accumulate == 1 else None
    case = Case(
        tuple(draw(st.lists(variants(), min_size=1, max_size=4))),
        seed=draw(st.integers(0, 1 << 20)),
        steps=steps,
        slots=draw(st.sampled_from([34, 48, 200])),
        nap=draw(st.sampled_from([0.0, 0.002])),
        depth=draw(st.sampled_from([1, 4, "auto", "epoch"])),
        prefetch=draw(st.sampled_from([0, 2])),
        own_loop=draw(st.booleans()),
        accumulate=accumulate,
        kind=draw(st.sampled_from(["memory", "disk"])),
        resumed=resumed,
    )
    return replace(killed(case), folder=folder)


def killed(case: Case) -> Case:
    """Kill a third of all cases. Which, and when, is not drawn: Hypothesis would draw the same again and again."""
    lot = zlib.crc32(repr(case).encode()) % 36
    if lot >= 12:
        return case
    return replace(
        case, accumulate=1, resumed=case.resumed or case.steps // 2, killed=("trains", "saves", "all")[lot % 3]
    )


CHUNKS, CASES = 10, 30
"""All chunks have 300 cases. `make test` runs a few."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(1, CHUNKS))])
def test_bits_are_those_of_lone_runs(chunk, campaign_seed, tmp_path):
    @seed(campaign_seed * CHUNKS + chunk)
    @settings(max_examples=CASES if chunk or settings.get_current_profile_name() == "campaign" else 4)
    @given(cases_of(tmp_path))
    def checked(case):
        with TemporaryDirectory(dir=tmp_path) as folder:
            check(replace(case, folder=Path(folder)))

    checked()


@pytest.mark.parametrize("order", [1, -1])
def test_variants_whose_rows_begin_otherwise(order, tmp_path):
    """From an array, drawn, or set by hand: a row that one variant has from the start begins in another when first used."""

    def made(variant):
        model, dense = make(variant)
        if variant.overrides["seed"] == 2:
            embeddings = variant.embeddings
            embeddings.set_rows("a", range(12), np.full((12, embeddings.tables[0].dim), 0.25, np.float32))
        return model, dense

    each = (Of(), Of(warm=True, rule=Adam()), Of(seed=2, dim=8, rule=Adagrad()))[::order]
    case = Case(each, slots=34, steps=8, resumed=3, folder=tmp_path, by_hand=12)
    for one in (replace(case, resumed=None), case):
        check(one, plain=False, made=made)


def test_one_reader_one_hash_one_plan(monkeypatch):
    """Many variants read, hash and plan no more than one."""
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
        assert sweep.engine.counters.steps == 6
    assert found[0] == found[1] == {"read": 6, "checked": 12, "planned": 12}


def test_cache_and_weights_are_given_back_when_a_variant_leaves():
    weights = []

    def made(variant):
        model, dense = make(variant)
        weights.append(ref(model.first.weight))
        return model, dense

    _, sweep = in_sweep(Case((Of(dropped=3), Of(), Of())), made)
    gc.collect()
    assert [weight() is None for weight in weights] == [True, False, False]
    with pytest.raises(RuntimeError, match=r"variant 'v0' has left the sweep \(dropped\), and its model is let go"):
        _ = sweep["v0"].model
    assert [pack.name for pack in sweep.engine.packs] == ["v1", "v2"]
    assert sweep.engine.held == [2 * width for width in sweep.engine.packs[0].widths], "rows are as narrow in the store"
    assert len(sweep) == 2 and sweep["v0"].left == "dropped"
