"""`skirl place score`: an existing plan is reported by rank, checked against memory, and compared with a searched one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from skirl.cli import main
from skirl.placement.tables.costs import save_costs, shipped
from skirl.placement.tables.score import ScoreTables
from skirl.placement.tables.spec import read_specs
from tests.placement.tables.test_nets import costs as with_net

TABLES = [{"name": n, "rows": 1000, "dim": 8, "ids": 640 * (k + 1), "distinct": 400} for k, n in enumerate("abc")]


def files(tmp_path, ranks=(0, 0, 1)):
    listed = {"format": "skirl-tables", "format_version": 1, "batch": 64, "tables": TABLES}
    tables = [
        {"name": t["name"], "rows": 1000, "dim": 8, "optimizer": "rowwise-adagrad",
         "pieces": [{"rank": r, "rows": [0, 1000], "columns": [0, 8]}]}
        for t, r in zip(TABLES, ranks, strict=True)
    ]  # fmt: skip
    plan = {"format": "skirl-table-plan", "format_version": 1, "ranks": 2, "tables": tables}
    (tmp_path / "t.json").write_text(json.dumps(listed))
    (tmp_path / "p.json").write_text(json.dumps(plan))
    return [str(tmp_path / "p.json"), str(tmp_path / "t.json")]


def test_a_plan_is_scored(tmp_path, capsys):
    both, by_sum = files(tmp_path), tmp_path / "costs.json"
    costs = replace(shipped(1.25e8, 2), kind="additive")
    save_costs(costs, by_sum)
    flags = ["--costs", str(by_sum), "--memory", "50KB", "--link", "1Gbit", "--seconds", "1", "--json"]
    assert main(["place", "score", *both, *flags]) == 1, "it does not fit"
    found, error = map(str.strip, capsys.readouterr())
    assert error == (
        "skirl place score: the plan exceeds the memory of a rank by 21.5 KiB: set --memory higher, or make another plan"
    )
    found = json.loads(found)
    ms = [sum(costs.of(spec, 1000, 8)[:2]) for spec in read_specs(tmp_path / "t.json")]
    assert found["busiest_ms"] == pytest.approx(max(ms[0] + ms[1], ms[2]))
    assert [rank["bytes"] for rank in found["ranks"]] == [72000, 36000] and found["bytes_over"] == 22000
    assert found["searched_ms"] is None and "7.8 KiB too little" in found["why"]
    assert main(["place", "score", *both, "--seconds", "1"]) == 0
    said = capsys.readouterr().out
    assert "a, b" in said and "% less" in said
    slower = found | {"searched_ms": found["busiest_ms"] * 1.002, "seconds": 1.0}
    assert (
        ScoreTables.summary(ScoreTables(Path(both[0]), Path(both[1])), slower)["search"]
        == "a search of 1.0 s finds no faster plan"
    )


def test_parts_of_ranks_add_up_to_the_busiest_also_with_a_net(tmp_path, capsys):
    both, path = files(tmp_path), tmp_path / "costs.json"
    costs = with_net(2)
    save_costs(replace(costs, ms={"rowwise-adagrad": costs.ms["sgd"]}), path)
    assert main(["place", "score", *both, "--costs", str(path), "--seconds", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    each = [rank["compute_ms"] + rank["exchange_ms"] for rank in found["ranks"]]
    assert max(each) == pytest.approx(found["busiest_ms"])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--seconds", "-1"], "--seconds is -1.0: set it to 0 or more"),
        (["--memory", "0B"], "--memory is '0B': set it to a size like 16GB"),
        (["--link", "fast"], "--link has 'fast': write a rate like 10Gbit"),
        (["--costs", "none.json"], "none.json is not a file: name costs"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, flags, text):
    assert main(["place", "score", *files(tmp_path), *flags]) in (1, 2)
    said = capsys.readouterr().err.strip()
    assert text in said and said.startswith("skirl place score: ") and "\n" not in said


def test_a_plan_for_other_tables_is_refused(tmp_path, capsys):
    both = files(tmp_path)
    (tmp_path / "t.json").write_text((tmp_path / "t.json").read_text().replace('"rows": 1000', '"rows": 1001'))
    assert main(["place", "score", *both]) == 1
    assert "has rows 1000 in the plan and 1001 now" in capsys.readouterr().err
