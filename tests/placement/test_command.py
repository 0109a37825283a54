"""`skirl place`: what it reads, prints and refuses, and which costs it goes by."""

import json
from dataclasses import replace

import numpy as np
import pytest

import skirl
from skirl.cli import main
from skirl.placement.costs import save_costs, shipped
from skirl.placement.measure import Arena, count_tables
from skirl.placement.spec import BINS, TableSpec, read_specs, reuse_of
from skirl.train.placed import Plan, count, read
from skirl.train.recipe import Recipe

HEAD = {"format": "skirl-tables", "format_version": 1, "batch": 64}
TABLE = {"name": "a", "rows": 1000, "dim": 8, "ids": 64, "distinct": 40}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr("skirl.placement.measure.arena_of", lambda kernel: Arena(1 << 16))


def written(tmp_path, tables, **head):
    path = tmp_path / "tables.json"
    path.write_text(json.dumps({**HEAD, **head, "tables": tables}))
    return path


def test_a_plan_is_printed_and_written(tmp_path, capsys, as_json):
    path, out = written(tmp_path, [{**TABLE, "name": f"t{n}", "dim": 4 * n} for n in range(1, 9)]), tmp_path / "p.json"
    flags = ["--ranks", "3", "--memory", "250KB", "--link", "1Gbit", "--out", str(out), "--no-measure"]
    assert main(["place", "--tables", str(path), *flags]) == 0
    said = capsys.readouterr().out
    for text in ("rank 0", "rank 2", "KiB of 244.1 KiB", "above perfect balance", str(out)):
        assert text in said
    plan = Plan.load(out)
    assert [name for name, *_ in plan.tables] == [f"t{n}" for n in range(1, 9)]
    plan.check(read_specs(path))
    assert main(["place", "--tables", str(path), *flags]) == 2
    assert f"--out is {out}, which already exists: name another file, or add --force" in capsys.readouterr().err
    found = as_json("place", "--tables", str(path), *flags, "--force")
    assert sum(rank["bytes"] for rank in found["ranks"]) == sum(1000 * (4 * n + 1) * 4 for n in range(1, 9))
    parts = [rank["compute_ms"] + rank["exchange_ms"] for rank in found["ranks"]]
    assert max(parts) == pytest.approx(found["busiest_ms"]) and not found["measured"]


BAD = [
    ([TABLE, TABLE], [], "table 'a' is listed twice"),
    ([{**TABLE, "ids": 0}], [], "table 'a' has 0 ids a batch"),
    ([{**TABLE, "distinct": 65}], [], "has 65 distinct rows a batch: set it above 0, to no more than its 64 ids"),
    ([{**TABLE, "colour": 1}], [], "unexpected keyword argument 'colour'"),
    ([{**TABLE, "reuse": [1]}], [], "has a reuse that is not 17 shares"),
    ([{**TABLE, "optimizer": "lion"}], [], "has optimizer 'lion': set it to one of"),
    (
        [TABLE],
        ["--memory", "1KB"],
        "and the ranks have 2.0 KiB, 33.2 KiB too little: give each more memory, or take 36 of them",
    ),
    ([{**TABLE, "split": "no"}], ["--memory", "20KB"], "rank 0 exceeds its memory by 15.6 KiB, since a table is"),
    ([{**TABLE, "rows": 1, "distinct": 1}], [], "there are 2 ranks for 1 rows: set fewer ranks than rows"),
    ([TABLE], ["--memory", "1KB,2KB,3KB"], "--memory is 1KB,2KB,3KB, and there are 2 ranks: name one for each"),
    ([TABLE], ["--costs", "c.txt"], "--costs is 'c.txt': name a file that ends in .json"),
    ([TABLE], ["--kernel", "fbgemm-cpu"], "skirl comes with no costs of kernel fbgemm-cpu: leave --no-measure out"),
    ([{**TABLE, "dim": 6}], ["--kernel", "fbgemm-cpu"], "has dim 6, and FBGEMM's operator takes multiples of 4"),
]


@pytest.mark.parametrize(("tables", "flags", "text"), BAD, ids=[text[:40] for *_, text in BAD])
def test_bad_input_is_one_sentence_and_no_file(tmp_path, capsys, tables, flags, text):
    path, out = written(tmp_path, tables), tmp_path / "p.json"
    try:
        code = main(["place", "--tables", str(path), "--out", str(out), "--no-measure", *flags])
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr().err.strip()
    assert code in (1, 2) and text in said and said.startswith("skirl place: ") and not out.exists()
    assert "\n" not in said


def test_costs_are_measured_once_and_kept(tmp_path, capsys, monkeypatch):
    asked = []

    def measured(kernel, optimizers, *, out, **how):
        asked.append((kernel, optimizers, str(out)))
        costs = shipped(1.0, 1)
        save_costs(replace(costs, ms={name: costs.ms[name] for name in optimizers}), out)
        return costs

    monkeypatch.setattr("skirl.placement.measure.measure_machine", measured)
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, [{**TABLE, "optimizer": "sgd"}, {**TABLE, "name": "b", "optimizer": "adagrad"}])
    for _ in range(2):
        assert main(["place", "--tables", str(path), "--quiet", "--seconds", "1", "--force"]) == 0
    assert asked == [("skirl-cpu", ["adagrad", "sgd"], "costs-skirl-cpu.json")]
    assert main(["place", "--tables", str(path), "--quiet", "--seconds", "1", "--force", "--kernel", "fbgemm-cpu",
                 "--costs", "costs-skirl-cpu.json"]) == 1  # fmt: skip
    error = capsys.readouterr().err
    assert "fbgemm" in error and len(asked) == 1  # they are for other kernels, or FBGEMM is not there
    written(tmp_path, [{**TABLE, "optimizer": "ftrl"}])
    assert main(["place", "--tables", str(path), "--force", "--no-measure", "--costs", "costs-skirl-cpu.json"]) == 1
    assert "costs-skirl-cpu.json has no costs for ftrl: leave --no-measure out" in capsys.readouterr().err


def test_tables_of_a_run_are_counted_and_placed(tmp_path, capsys):
    flags = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 64, "steps": 3}
    recipe = Recipe.of(**flags)
    found, batches = count_tables(recipe), []
    for sparse in (batch.sparse for batch in recipe.stream()):
        sizes = [int(lengths.sum()) for lengths in sparse.lengths().split(sparse.stride())]
        batches.append(dict(zip(sparse.keys(), sparse.values().split(sizes), strict=True)))
    for table, spec in zip(recipe.tables(), found, strict=True):
        counts = [np.unique(of[table.features[0]].numpy(), return_counts=True)[1] for of in batches]
        assert (spec.name, spec.rows, spec.dim, spec.batch) == (table.name, table.rows, table.dim, 64)
        assert (spec.ids, spec.distinct) == (sum(map(sum, counts)) / 3, sum(map(len, counts)) / 3)
        assert np.allclose(spec.reuse, reuse_of(np.concatenate(counts))) and len(spec.reuse) == BINS
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    out = tmp_path / "p.json"
    assert main(["place", *words, "--no-measure", "--quiet", "--seconds", "1", "--out", str(out)]) == 0
    assert len(Plan.load(out).tables) == len(found) and "perfect balance" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "is no list of tables"),
        ('{"format": "skirl-tables"', "is no list of tables, Expecting"),
        ('{"format": "skirl-tables", "format_version": 9}', "format_version is 9, not 1"),
        ('{"format": "skirl-tables", "format_version": 1, "batch": 2, "tables": [{"name": "a"}]}', "rows is missing"),
        (json.dumps({**HEAD, "tables": [TABLE]}).replace("64,", "NaN,", 1), "has batch nan"),
    ],
)
def test_a_wrong_list_is_refused(tmp_path, text, says):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match=says):
        read_specs(tmp_path / "t.json")


def test_a_plan_for_trainers_is_one_that_they_take(tmp_path, capsys, as_json):
    often = [0.0] * BINS
    often[6] = 1.0  # each row is looked up 64 times
    tables = [
        {"name": "one", "rows": 5000, "dim": 8, "ids": 64, "distinct": 60},
        {"name": "bags", "rows": 5000, "dim": 8, "ids": 6400, "distinct": 4000},
        {"name": "few", "rows": 900, "dim": 64, "ids": 640, "distinct": 10, "reuse": often},
    ]
    path, out = written(tmp_path, tables), tmp_path / "p.json"
    words = ["place", "--tables", str(path), "--trainers", "2", "--link", "1Mbit", "--no-measure", "--out", str(out)]
    found = as_json(*words)
    assert found["ways"]["bags"]["whole"] < found["ways"]["bags"]["rows"] / 2
    assert found["ways"]["few"]["rows"] == pytest.approx((8 * 64 + 4) * 2 * 10 / 2)  # both trainers look all of them up
    chosen = read(out, [skirl.Table(one["name"], one["rows"], one["dim"]) for one in tables], 2)
    assert "bags" in chosen and "few" not in chosen
    assert {name: of["trainer"] for name, of in found["ways"].items() if of["trainer"] is not None} == chosen
    assert main([*words, "--force"]) == 0 and "whole at" in capsys.readouterr().out


def test_a_table_that_is_most_of_the_work_is_cut_by_columns(tmp_path, capsys):
    tables = [{"name": "most", "rows": 5000, "dim": 64, "ids": 64000, "distinct": 4000}]
    tables += [{"name": "one", "rows": 5000, "dim": 8, "ids": 64, "distinct": 60}]
    path, out = written(tmp_path, tables), tmp_path / "p.json"
    words = ["place", "--tables", str(path), "--trainers", "2", "--link", "1Gbit", "--no-measure", "--out", str(out)]
    assert main([*words, "--optimizer", "adagrad"]) == 0 and " ms each at most" in capsys.readouterr().out
    made = [skirl.Table(one["name"], one["rows"], one["dim"]) for one in tables]
    assert read(out, made, 2)["most"] == {0: 32, 1: 32}
    assert main([*words, "--force"]) == 0 and "columns" not in capsys.readouterr().out, "row-wise: other bits"


def test_columns_send_their_share_of_vectors_and_all_ids():
    spec = TableSpec("a", 40, 8, 64, 640.0, 40.0, optimizer="sgd")
    costs = replace(shipped(1e6, 4), sent={"a": spec.sent(4)})
    vectors = 1e3 * 8 * 64 * 2 * 3 / 4 / 1e6  # both ways, of two columns more, three of four trainers being others
    assert costs.exchange(spec, 40, 6) - costs.exchange(spec, 40, 4) == pytest.approx(vectors)
    assert costs.exchange(spec, 40, 8) == pytest.approx(1e3 * spec.sent(4).whole / 1e6)


def test_the_bytes_of_data_are_those_of_its_trainers(tmp_path, as_json):
    """A session's samples come to one trainer, so its rows go to fewer of them than if samples were spread."""
    data = ["synthetic:sessions", "--model", "dlrm-tiny", "--dim", "8", "--batch", "256", "--steps", "4"]
    ways = as_json("place", *data, "--trainers", "4", "--no-measure", "--out", str(tmp_path / "p.json"))["ways"]
    recipe = Recipe.of(data="synthetic:sessions", model="dlrm-tiny", dim=8, batch=256, steps=4)
    counted = count((batch.sparse for batch in recipe.stream()), recipe.tables(), 4)
    assert {name: (of["rows"], of["whole"], of["ids"]) for name, of in ways.items()} == {
        n: of for n, (of, _) in counted.items()
    }


def test_bytes_of_samples_that_are_spread_are_those_of_drawn_ones():
    draw, rows = np.random.default_rng(0), np.arange(40)
    ids = draw.permutation(np.repeat(rows, 2 ** (rows % 5)))  # looked up 1, 2, 4, 8 or 16 times
    parts = [sum(len(np.unique(part)) for part in np.array_split(draw.permutation(ids), 4)) for _ in range(400)]
    spec = TableSpec("a", 40, 8, 64, float(len(ids)), 40.0, reuse_of(np.bincount(ids)), "sgd")
    assert spec.sent(4).rows == pytest.approx(np.mean(parts) * (8 * 8 + 4) * 3 / 4, rel=0.02)
