"""`skirl place tables`: what it reads, prints and refuses; costs and their file; randomly generated tables."""

import json

import numpy as np
import pytest

from skirl.cli import main
from skirl.placement.tables.costs import load_costs, save_costs, shipped
from skirl.placement.tables.plan_file import TablePlan
from skirl.placement.tables.pool import POOLING, ROWS, ids_of, pool
from skirl.placement.tables.spec import TableSpec, read_specs, specs_of, specs_text
from skirl.placement.tables.terms import TERMS, fitted
from skirl.train.recipe import Recipe

HEAD = {"format": "skirl-tables", "format_version": 1, "batch": 64}
TABLE = {"name": "a", "rows": 1000, "dim": 8, "ids": 64, "distinct": 40}
PLAN_HEAD = {"format": "skirl-table-plan", "format_version": 1, "ranks": 2}
ROWS_OF = {"name": "a", "rows": 10, "dim": 8, "optimizer": "sgd"}


def written(tmp_path, tables, **head):
    path = tmp_path / "tables.json"
    path.write_text(json.dumps({**HEAD, **head, "tables": tables}))
    return path


def test_a_plan_is_printed_and_written(tmp_path, capsys):
    tables = [{**TABLE, "name": f"t{n}", "dim": 4 * n} for n in range(1, 9)]
    path, out = written(tmp_path, tables), tmp_path / "p.json"
    flags = ["--ranks", "3", "--memory", "250KB", "--speeds", "1", "1", "2", "--link", "1Gbit", "--out", str(out)]
    assert main(["place", "tables", str(path), *flags]) == 0
    said = capsys.readouterr().out
    for text in ("rank 0", "rank 2", "KiB of 244.1 KiB", "above perfect balance", "not measured", "advice", str(out)):
        assert text in said
    plan = TablePlan.load(out)
    assert [name for name, *_ in plan.tables] == [f"t{n}" for n in range(1, 9)]
    plan.check(read_specs(path))
    assert main(["place", "tables", str(path), *flags, "--force", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sum(rank["bytes"] for rank in found["ranks"]) == sum(1000 * (4 * n + 1) * 4 for n in range(1, 9))
    parts = [rank["compute_ms"] + rank["forward_ms"] + rank["backward_ms"] for rank in found["ranks"]]
    assert max(parts) == pytest.approx(found["busiest_ms"])


def test_a_table_that_is_cut_does_not_keep_a_rank_busy_alone(tmp_path, capsys):
    path = written(tmp_path, [{**TABLE, "optimizer": "rowwise-adagrad"}])
    flags = ["--ranks", "2", "--memory", "9KiB", "1GiB", "--out", str(tmp_path / "p.json")]
    assert main(["place", "tables", str(path), *flags]) == 0
    said = capsys.readouterr().out
    assert "a (2 parts by rows)" in said
    advice = "a is cut, and no other cut that fits makes the ranks more alike: set --ranks 1 or more --memory."
    assert advice in said


BAD = [
    ([TABLE, TABLE], [], "table 'a' is listed twice: remove one of them"),
    ([], [], "there is no table: name at least one"),
    ([{**TABLE, "ids": 0}], [], "table 'a' has 0 ids a batch"),
    ([{**TABLE, "distinct": 65}], [], "has 65 distinct rows a batch: set it above 0, to no more than its 64 ids"),
    ([{**TABLE, "dim": 0}], [], "has dim 0: set it to a whole number of 1 or more"),
    ([{**TABLE, "colour": 1}], [], "has 'colour', which skirl does not know"),
    ([{**TABLE, "reuse": [1]}], [], "has a reuse that is not 17 shares"),
    ([{**TABLE, "optimizer": "lion"}], [], "has optimizer 'lion': set it to one of"),
    ([{**TABLE, "optimizer": ["sgd"]}], [], "has optimizer ['sgd']: set it to one of"),
    ([{**TABLE, "group": 3}], [], "has group 3: set it to a name"),
    ([{**TABLE, "rank": 2}], [], "table 'a' has rank 2, there are ranks 0 to 1: name one"),
    (
        [{**TABLE, "group": "g", "rank": 0}, {**TABLE, "name": "b", "group": "g", "rank": 1}],
        [],
        "and have ranks 0 and 1",
    ),
    ([{**TABLE, "optimizer": "ftrl"}], [], "the costs have no ftrl, which table 'a' has"),
    ([TABLE], ["--memory", "1KB"], "(a 35.2 KiB), the ranks hold 2.0 KiB, 33.2 KiB too little"),
    ([{**TABLE, "split": "no"}], ["--memory", "20KB"], "rank 0 exceeds its memory by 15.6 KiB (a may not be cut)"),
    ([{**TABLE, "rows": 1, "distinct": 1}], [], "there are 2 ranks for 1 rows: set fewer ranks than rows"),
    ([TABLE], ["--memory", "1KB", "2KB", "3KB"], "--memory is 1KB 2KB 3KB, and there are 2 ranks: name one for each"),
    ([TABLE], ["--link", "measured"], "the costs have no measured exchange: measure it with"),
    ([TABLE], ["--link", "fast"], "--link has 'fast': write a rate like 10Gbit"),
    ([TABLE], ["--speeds", "nan"], "--speeds has nan: set it above 0"),
    ([TABLE], ["--ranks", "0"], "--ranks is 0: set it to 1 to 1024"),
    ([TABLE], ["--seconds", "0"], "--seconds is 0.0: set it above 0"),
    ([TABLE], ["--costs", "none.json"], "none.json is not a file: name costs that `skirl place costs` wrote"),
]


@pytest.mark.parametrize(("tables", "flags", "text"), BAD, ids=[text[:40] for *_, text in BAD])
def test_bad_input_is_one_sentence_and_no_file(tmp_path, capsys, tables, flags, text):
    path, out = written(tmp_path, tables), tmp_path / "p.json"
    assert main(["place", "tables", str(path), "--out", str(out), *flags]) in (1, 2)
    said = capsys.readouterr().err.strip()
    assert text in said and said.startswith("skirl place tables: ") and "\n" not in said and not out.exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "it is not a list of tables"),
        ('{"format": "skirl-tables"', "cut short"),
        ('{"format": "skirl-tables", "format_version": 9}', "its format is 9, skirl reads 1"),
        ('{"format": "skirl-tables", "format_version": 1, "batch": 2, "tables": [{"name": "a"}]}', "rows is missing"),
        (json.dumps({**HEAD, "tables": [TABLE]}).replace("64,", "NaN,", 1), "it has NaN, which is not a number"),
    ],
)
def test_a_wrong_list_is_refused(tmp_path, text, says):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match=says):
        read_specs(tmp_path / "t.json")


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([], "is at no rank"),
        ([(0, 0, 9, 0, 8)], "no piece has columns 0 to 8 of rows 9 to 10"),
        ([(0, 0, 6, 0, 8), (1, 5, 10, 0, 8)], "two pieces have columns 0 to 8 of rows 5 to 6"),
        ([(0, 0, 10, 0, 4)], "no piece has columns 4 to 8"),
        ([(0, 0, 10, 0, 6), (1, 0, 10, 6, 8)], "cut columns at multiples of 4"),
        ([(0, 0, 11, 0, 8)], "has a piece of rows 0 to 11"),
        ([(2, 0, 10, 0, 8)], "at rank 2: there are ranks 0 to 1"),
    ],
)
def test_a_plan_that_does_not_cover_is_refused(pieces, says):
    said = [{"rank": rank, "rows": [a, b], "columns": [c, d]} for rank, a, b, c, d in pieces]
    with pytest.raises(ValueError, match=says):
        TablePlan.parsed(json.dumps({**PLAN_HEAD, "tables": [{**ROWS_OF, "pieces": said}]}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "x"}, "it is not a file of costs"),
        ({"format_version": 1}, "its format is 1, skirl reads 2"),
        ({"backend": "cuda"}, "it is for backend 'cuda', not for 'skirl-cpu': measure costs for"),
        ({"terms": ["ids"]}, "its terms are ids, skirl has table, ids"),
        ({"ms": {"sgd": [1.0]}}, "give 10 finite numbers of 0 or more"),
        ({"ms": {"sgd": [-1.0] * 10}}, "give 10 finite numbers of 0 or more"),
        ({"ms": {"sgd": [float("nan")] * 10}}, "it has NaN, which is not a number"),
        ({"ms": {"lion": [1.0] * 10}}, "costs are of optimizer 'lion'"),
        ({"machine": {"processor": "Z80"}}, "machine.device is missing: measure again"),
        ({"machine": {"processor": 80, "device": "cpu"}}, "machine.processor is 80, not a text: measure again"),
    ],
)
def test_wrong_costs_are_refused(tmp_path, change, says):
    save_costs(shipped(1e9, 2), tmp_path / "c.json")
    assert load_costs(tmp_path / "c.json", link=1e9, ranks=2).ms == shipped(1e9, 2).ms
    body = json.loads((tmp_path / "c.json").read_text()) | change
    del body["digest"]
    (tmp_path / "c.json").write_text(json.dumps(body))
    with pytest.raises(ValueError, match=says):
        load_costs(tmp_path / "c.json", link=1e9, ranks=2)


def test_a_fit_finds_what_times_were_made_of():
    rng = np.random.default_rng(0)
    terms = rng.random((40, len(TERMS)))
    ms = np.array([0.1, 0, 2, 0, 0.5, 1, 0, 0, 3, 0.2])
    assert np.allclose(fitted(terms, terms @ ms), ms, atol=1e-6)
    longer = np.where(np.arange(40) % 5 == 2, 1.5, 1.0)  # disturbed: least squares would be off by a tenth
    assert np.median(np.abs(terms @ fitted(terms, terms @ ms * longer) / (terms @ ms) - 1)) < 0.01
    assert min(fitted(terms, terms @ np.array([1, -0.3, 2, 0, 0.5, 1, 0, 0, 0, 0]))) >= 0


def test_specs_of_batches_are_counts():
    batches = [[np.array([1, 1, 2]), np.array([5])], [np.array([3, 4, 4, 4, 4]), np.array([5])]]
    a, b = specs_of([("a", 10, 4), ("b", 20, 8)], batches, batch=2)
    assert (a.ids, a.distinct, b.ids, b.distinct) == (4, 2, 1, 1)
    assert a.reuse[:3] == (0.5, 0.25, 0.25) and b.reuse[0] == 1
    with pytest.raises(ValueError, match="table 'c' has no ids in 1 batches"):
        specs_of([("c", 10, 4)], [[np.array([], np.int64)]], batch=2)


def test_tables_of_a_run_are_listed_and_placed(tmp_path, capsys):
    flags = ["synthetic:tiny", "--model", "dlrm-tiny", "--dim", "4", "--batch", "64", "--steps", "3", "--quiet"]
    assert main(["place", "list", *flags, "--out", str(tmp_path / "t.json")]) == 0
    assert "3 batches" in capsys.readouterr().out
    recipe = Recipe.of(data="synthetic:tiny", model="dlrm-tiny", dim=4, batch=64, steps=3)
    names = [table.name for table in recipe.tables()]
    batches = []
    for sparse in (batch.sparse for batch in recipe.stream()):
        sizes = [int(lengths.sum()) for lengths in sparse.lengths().split(sparse.stride())]
        ids = dict(zip(sparse.keys(), sparse.values().split(sizes), strict=True))
        batches.append([ids[table.features[0]].numpy() for table in recipe.tables()])
    by_hand = specs_of([(t.name, t.rows, t.dim) for t in recipe.tables()], batches, batch=64)
    found = read_specs(tmp_path / "t.json")
    assert [s.name for s in found] == names
    assert [(s.rows, s.ids, s.distinct) for s in found] == [(s.rows, s.ids, s.distinct) for s in by_hand]
    assert np.allclose([s.reuse for s in found], [s.reuse for s in by_hand])
    out = str(tmp_path / "p.json")
    assert main(["place", "tables", str(tmp_path / "t.json"), "--ranks", "2", "--out", out]) == 0


def test_made_tables_have_the_published_moments(tmp_path):
    made = pool(400, batch=64, max_dim=128, seed=0)
    assert np.mean([m.spec.rows for m in made]) == pytest.approx(ROWS, rel=0.1)
    assert np.mean([m.spec.ids / 64 for m in made]) == pytest.approx(POOLING, rel=0.2)
    assert {m.spec.dim for m in made} == {4, 8, 16, 32, 64, 128}
    one = TableSpec("a", 4_000_000, 64, 65536, 65536 * 16.0, 1.0)
    (tmp_path / "t.json").write_text(specs_text([m.spec for m in made]))
    assert read_specs(tmp_path / "t.json") == [m.spec for m in made]
    assert 0 <= ids_of(one, 8.0, np.random.default_rng(0)).min() < one.rows
