"""The file of a placement: it loads as it was written, and each thing wrong with it gives one sentence."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.core.placement import Cut, PlacedTable, PlacementPlan, Site
from skirl.core.tables import Table
from tests.cases import cases


@st.composite
def plans(draw: st.DrawFn) -> PlacementPlan:
    sites = draw(st.integers(1, 5))
    tables = []
    for name in draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True)):
        rows = draw(st.integers(sites, 10_000))
        by = draw(st.sampled_from(["hash", "rows"]))
        inner = draw(st.sets(st.integers(1, (2**64 if by == "hash" else rows) - 1), max_size=4)) if rows > 1 else set()
        of = draw(st.lists(st.integers(0, sites - 1), min_size=len(inner) + 1, max_size=len(inner) + 1))
        by = by if inner else "hash"  # a table in one piece counts as whole
        cut, nbytes = Cut((0, *sorted(inner)), tuple(of), by), draw(st.none() | st.integers(1, 999))
        tables.append(PlacedTable(name, rows, draw(st.integers(1, 64)), cut, nbytes))
    memory, rate = st.none() | st.integers(1, 1 << 40), st.none() | st.floats(1, 1e12)
    return PlacementPlan(tuple(Site(f"s{n}", "memory", draw(memory), draw(rate)) for n in range(sites)), tuple(tables))


@cases(60)
@given(plan=plans(), seed=st.integers(0, 99))
def test_what_is_written_comes_back_and_has_every_row_once(plan, seed):
    assert PlacementPlan.parsed(plan.text()) == plan
    body, rng = json.loads(plan.text()), np.random.default_rng(seed)
    names = [site.name for site in plan.sites]
    for number, (table, said) in enumerate(zip(plan.tables, body["tables"], strict=True)):
        rows = rng.integers(0, table.rows, 20)
        found = plan.placement.site_of(number << 48 | rows)
        if said["by"] == "rows":  # checked by hand: each row is in one piece
            wanted = [[p["site"] for p in said["pieces"] if p["begin"] <= row < p["end"]] for row in rows.tolist()]
        elif said["by"] == "whole":
            wanted = [[said["pieces"][0]["site"]] for _ in rows]
        else:
            assert said["pieces"][-1]["end"] == hex(1 << 64)
            continue
        assert [[names[site]] for site in found] == wanted


def example() -> dict:
    return {
        "format": "skirl-placement",
        "format_version": 1,
        "sites": [{"name": "a", "store": "memory"}, {"name": "b", "store": "disk:rows/b"}],
        "tables": [
            {"name": "user", "rows": 10, "dim": 4, "by": "rows",
             "pieces": [{"site": "a", "begin": 0, "end": 4}, {"site": "b", "begin": 4, "end": 10}]},
            {"name": "item", "rows": 10, "dim": 4, "by": "hash",
             "pieces": [{"site": "a", "begin": "0x0", "end": f"0x8{'0' * 15}"},
                        {"site": "b", "begin": f"0x8{'0' * 15}", "end": f"0x1{'0' * 16}"}]},
            {"name": "tag", "rows": 10, "dim": 4, "by": "whole", "pieces": [{"site": "b"}]},
        ],
    }  # fmt: skip


def test_one_written_by_hand():
    plan = PlacementPlan.parsed(json.dumps(example()))
    assert [table.cut for table in plan.tables] == [Cut((0, 4), (0, 1), "rows"), Cut.even([0, 1]), Cut((0,), (1,))]
    assert plan.placement.site_of(np.array([3, 4, 2 << 48])).tolist() == [0, 1, 1]


def test_a_table_may_have_as_many_rows_as_there_are_row_numbers():
    plan = PlacementPlan((Site("a", "memory"), Site("b", "memory")), (PlacedTable("user", 2**48, 4, Cut.even([0, 1])),))
    assert PlacementPlan.parsed(plan.text()) == plan
    assert plan.placement.site_of(np.array([0, 2**48 - 1])).shape == (2,)
    plan.check([("user", Table("user", 2**48, 4).rows, 4)])
    with pytest.raises(ValueError, match=r"^table 'user' has rows 281474976710657: .* from 1 to 2\*\*48$"):
        PlacedTable("user", 2**48 + 1, 4, Cut.even([0, 1]))


def changed(path: str, value) -> str:
    body = example()
    *names, last = (int(name) if name.isdecimal() else name for name in path.split("."))
    at = body
    for name in names:
        at = at[name]
    at[last] = value
    return json.dumps(body)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is cut short, or is not JSON"),
        (json.dumps(example())[:200], "it is cut short, or is not JSON"),
        ("[1]", "it is not a plan of a placement"),
        (changed("format_version", 2), "its format is 2, skirl reads 1"),
        (changed("digest", "00"), "it was changed since it was written"),
        (changed("sites", []), "the plan has no site"),
        (changed("sites.1.name", "a"), "site 'a' is in the plan twice"),
        (changed("sites.0.store", "placed:x.json"), "site 'a' has store 'placed:x.json': set it to memory"),
        (changed("sites.0.store", "checkpoint"), "site 'a' has store 'checkpoint': set it to memory"),
        (changed("sites.0.store", "disk:rows/b"), "sites 'a' and 'b' have one store, disk:rows/b"),
        (changed("sites.0.memory", 0), "site 'a' has memory 0: set it to bytes above 0"),
        (changed("sites.0.rate", float("nan")), "it has NaN, which is not a number"),
        (changed("tables.1.name", "user"), "table 'user' is in the plan twice"),
        (changed("tables.0.rows", 0), "table 'user' has rows 0: set it to a whole number from 1 to 2**48"),
        (changed("tables.0.dim", "4"), "table 'user' has dim '4'"),
        (changed("tables.0.record_bytes", 0.5), "table 'user' has record_bytes 0.5"),
        (changed("tables.0.by", "column"), "table 'user' is cut by 'column'"),
        (changed("tables.0.pieces.1.begin", 3), "table 'user': two pieces have row 3 to row 4: cover each row once"),
        (changed("tables.0.pieces.1.begin", 6), "table 'user': no piece has row 4 to row 6: cover each row once"),
        (changed("tables.0.pieces.1.end", 9), "table 'user': no piece has row 9 to the end"),
        (
            changed("tables.0.pieces.1.end", 11),
            "table 'user': a piece ends at row 11, and the table has 10 rows: end it there",
        ),
        (changed("tables.0.pieces.0.end", 0), "table 'user': a piece ends at row 0, where it begins"),
        (changed("tables.0.pieces.0.begin", -1), "table 'user': begin of a piece is -1: set it to a place of rows"),
        (changed("tables.0.pieces.0.columns", [0, 2]), "table 'user' is cut by columns, which no store can hold yet"),
        (changed("tables.1.pieces.1.end", "0xf"), "a piece ends at 0xf, where it begins"),
        (changed("tables.1.pieces.1.end", "0xffffffffffffffff"), "no piece has 0xffffffffffffffff to the end"),
        (changed("tables.1.pieces.0.site", "c"), "table 'item' has rows at site 'c', but the sites are a, b"),
        (changed("tables.1.pieces", []), "table 'item': no piece has 0x0 to the end"),
        (changed("tables.2.pieces", []), "table 'tag' is whole and has 0 pieces: give it one"),
        (changed("tables.2.pieces", [{}]), "tables.2.pieces.0.site is missing"),
    ],
)
def test_a_wrong_file_is_refused_in_a_sentence(text, says, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"plan.json: ") as refused:
        PlacementPlan.load(path)
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ([("user", 10, 4), ("item", 10, 4)], "the plan has a table 'tag', which the model does not have"),
        (
            [("user", 10, 4), ("item", 10, 4), ("tag", 10, 4), ("x", 1, 1)],
            "the plan has no table 'x', it has user, item",
        ),
        ([("item", 10, 4), ("user", 10, 4), ("tag", 10, 4)], "table 0 is 'user' in the plan but 'item' in the model"),
        (
            [("user", 11, 4), ("item", 10, 4), ("tag", 10, 4)],
            "table 'user' has rows 10 in the plan and 11 in the model",
        ),
        ([("user", 10, 4), ("item", 10, 8), ("tag", 10, 4)], "table 'item' has dim 4 in the plan and 8 in the model"),
    ],
)
def test_other_tables_are_refused(tables, says):
    plan = PlacementPlan.parsed(json.dumps(example()))
    plan.check([("user", 10, 4), ("item", None, 4), ("tag", 10, None)])
    with pytest.raises(ValueError, match=says):
        plan.check(tables)


def test_rows_larger_than_those_that_a_site_has_memory_for_are_refused():
    tables, body = [("user", 10, 4), ("item", 10, 4), ("tag", 10, 4)], example()
    body["tables"][1]["record_bytes"] = 20
    PlacementPlan.parsed(json.dumps(body)).check(tables, [99, 99, 99])
    body["sites"][1]["memory"] = 1000
    plan = PlacementPlan.parsed(json.dumps(body))
    plan.check(tables, [99, 20, 99])
    with pytest.raises(
        ValueError, match="'item' takes 20 bytes with its optimizer state in the plan and 48 in this run"
    ):
        plan.check(tables, [99, 48, 99])
