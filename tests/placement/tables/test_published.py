"""Published pools: sizes as they are published, lookups with the ids and distinct rows that their specs tell."""

import numpy as np
import pytest

from skirl.cli import main
from skirl.placement.tables import calibrate
from skirl.placement.tables.measure import Lookups
from skirl.placement.tables.pieces import Piece
from skirl.placement.tables.pool import MultiHot, ids_of
from skirl.placement.tables.published import pool_of, published, sizes
from skirl.placement.tables.spec import TableSpec, read_specs

ROWS = (
    "40000000,39060,17295,7424,20265,3,7122,1543,63,40000000,3067956,405282,10,2209,11938,155,4,976,14,40000000,40000000,"
    "40000000,590152,12973,108,36"
)
HOTS = "3,2,1,2,6,1,1,1,1,7,3,8,1,6,9,5,1,1,1,12,100,27,10,3,1,1"
"""num_embeddings_per_feature and multi_hot_sizes of MLPerf's benchmark, as its README gives them."""


def test_mlperfs_tables_are_those_of_its_readme():
    tables = sizes("mlperf")
    assert [of.rows for of in tables] == [int(n) for n in ROWS.split(",")]
    assert [of.hots for of in tables] == [int(n) for n in HOTS.split(",")]
    assert [of.name for of in tables] == [f"C{n}" for n in range(1, 27)]
    for name, rows in (("criteo-kaggle", 33_762_577), ("criteo-terabyte", 882_774_559)):
        tables = sizes(name)
        assert sum(of.rows for of in tables) == rows and {of.hots for of in tables} == {1} and len(tables) == 26


@pytest.mark.parametrize("name", ["mlperf", "criteo-kaggle"])
def test_specs_tell_what_a_batch_looks_up(name):
    made = published(name, batch=64, dims=[4, 8], seed=1, optimizer="sgd")
    assert {of.spec.dim for of in made} == {4, 8} and {of.spec.optimizer for of in made} == {"sgd"}
    again = published(name, batch=64, dims=[4, 8], seed=1, optimizer="sgd")
    assert again == made != published(name, batch=64, dims=[4, 8], seed=2, optimizer="sgd")
    for of, size in zip(made, sizes(name), strict=True):
        ids = ids_of(of.spec, of.head, np.random.default_rng(5))  # another batch
        assert len(ids) == of.spec.ids == 64 * size.hots and ids.min() >= 0 and ids.max() < of.spec.rows
        counts = np.unique(ids, return_counts=True)[1]
        assert len(counts) == pytest.approx(of.spec.distinct, rel=0.35, abs=3) and sum(of.spec.reuse) == pytest.approx(
            1
        )


def test_an_id_brings_the_same_rows_whenever_it_comes():
    spec = TableSpec("a", rows=5000, dim=8, batch=400, ids=2000.0, distinct=500.0)
    brought = dict[int, tuple[int, ...]]()
    for seed in (0, 1):
        ids = MultiHot(5).ids(spec, np.random.default_rng(seed)).reshape(400, 5)
        assert ids.min() >= 0 and ids.max() < 5000
        for first, *others in ids.tolist():
            assert brought.setdefault(first, tuple(others)) == tuple(others)
    assert 100 < len(brought) < 700  # some come again
    others = np.array(list(brought.values()))
    assert abs(others.mean() / 2500 - 1) < 0.1 and len(np.unique(others)) > 0.85 * others.size  # drawn from all rows
    half = np.unique(MultiHot(1).ids(spec, np.random.default_rng(0)), return_counts=True)[1]
    assert half.max() > 10  # the first rows are hot


@pytest.mark.parametrize(("name", "hots"), [("mlperf", [int(n) for n in HOTS.split(",")]), ("criteo-kaggle", [1] * 26)])
def test_each_sample_has_its_ids(name, hots):
    for of, count in zip(published(name, batch=48, dims=[4], seed=0), hots, strict=True):
        lookups = Lookups(of, 7)
        assert np.bincount(lookups.bags, minlength=48).tolist() == [count] * 48
        if count > 1:  # those of a sample are together: its first id brings the others
            first = lookups.ids.reshape(48, count)
            assert {len({tuple(of) for of in first.tolist() if of[0] == one}) for one in first[:, 0].tolist()} == {1}
        half = Piece(0, 0, max(1, of.spec.rows // 2), 0, 4)
        ids, bags = lookups.of(half)
        assert [*zip(ids, bags)] == [(row, n // count) for n, row in enumerate(lookups.ids) if row < half.row_end]


def test_pools_by_name():
    assert [of.spec.name for of in pool_of("production", 3, batch=8, max_dim=8, seed=0)] == [
        "table-0",
        "table-1",
        "table-2",
    ]
    made = pool_of("criteo-kaggle", 3, batch=8, max_dim=16, seed=0)
    assert len(made) == 26 and {of.spec.dim for of in made} == {4, 8, 16}


def test_a_published_pool_is_listed(tmp_path, capsys):
    out = tmp_path / "m.json"
    flags = ["--pool", "mlperf", "--dim", "128", "--batch", "32", "--optimizer", "rowwise-adagrad", "--out", str(out)]
    assert main(["place", "list", *flags, "--quiet"]) == 0
    assert "looks up 6,848 ids of" in capsys.readouterr().out
    specs = read_specs(out)
    assert [spec.ids for spec in specs] == [32.0 * int(n) for n in HOTS.split(",")]
    assert {(spec.dim, spec.batch, spec.optimizer) for spec in specs} == {(128, 32, "rowwise-adagrad")}


def test_what_a_published_pool_would_ignore_is_refused(tmp_path, capsys):
    out = tmp_path / "m.json"
    for flags, names in (
        (["synthetic:tiny"], "--data"),
        (["--rows-scale", "0.1", "--steps", "9"], "--steps and --rows-scale"),
        (["synthetic:tiny", "--valid", "20%"], "--data and --valid"),
    ):
        assert main(["place", "list", *flags, "--pool", "mlperf", "--out", str(out)]) == 2
        said = f"--pool is mlperf, for which no data is read: leave {names} out"
        assert said in capsys.readouterr().err and not out.exists()
    rows = []
    for seed in ("0", "1"):
        assert (
            main(["place", "list", "--pool", "mlperf", "--batch", "8", "--seed", seed, "--out", str(out), "--force"])
            == 0
        )
        rows.append([spec.distinct for spec in read_specs(out)])
    assert rows[0] != rows[1]


def test_costs_are_measured_on_a_published_pool(monkeypatch, tmp_path, capsys):
    seen = {}

    def machine_costs(*args, tables, backend, **more):
        seen.update(tables=list(tables), backend=backend)
        raise ValueError("enough")

    monkeypatch.setattr(calibrate, "machine_costs", machine_costs)
    assert main(["place", "costs", "--pool", "mlperf", "--out", str(tmp_path / "c.json")]) == 1
    assert [spec.rows for spec in seen["tables"]] == [int(n) for n in ROWS.split(",")] and seen[
        "backend"
    ] == "skirl-cpu"
    assert {spec.batch for spec in seen["tables"]} == {1024}
    capsys.readouterr()
    assert main(["place", "costs", "--pool", "mlperf", "--tables", "t.json"]) == 2
    assert "--tables and --pool are both set, to t.json and mlperf: leave one of them out" in capsys.readouterr().err
    assert main(["place", "costs", "--pool", "meta"]) == 2
