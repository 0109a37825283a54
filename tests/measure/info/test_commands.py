"""What `skirl info` says about things it does not know, and of when; tests/habits/test_commands.py covers the rest."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from skirl import cli
from skirl.core.placement import Cut
from skirl.core.placement_plan import PlacedTable, PlacementPlan, Site
from skirl.measure.info.look import made
from skirl.pipeline.timeline import Timeline
from skirl.placement.tables.costs import SHIPPED
from skirl.placement.tables.pieces import Piece
from skirl.placement.tables.plan_file import TablePlan
from skirl.placement.tables.spec import TableSpec, specs_text
from skirl.train import origin
from skirl.train.report.page import Page
from tests.dedup.rows import Row, schema, write


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("x.parquet", b"PAR1 and no more", "is a Parquet file, damaged or cut off"),
        ("x.json", b"{}", "is a JSON file that skirl does not recognise"),
        ("x.bin", b"a\0b", "is not a file that skirl recognises"),
        ("x.pt", b"PK\3\4", "is a damaged or unfinished file of torch.save"),
        ("nowhere", None, "does not exist"),
        (".", None, "is a folder that skirl does not recognise"),
    ],
)
def test_the_unknown_is_one_sentence(name: str, content: bytes | None, said: str, tmp_path: Path, capsys):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert cli.main(["info", str(tmp_path / name)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("skirl info: ") and said in line


def test_a_run_folder_without_its_config_or_with_a_damaged_file_is_told_by_name(tmp_path: Path, capsys):
    (tmp_path / "metrics.jsonl").write_text("")
    said = []
    for config in (None, "{}"):
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        assert cli.main(["info", str(tmp_path)]) == 1
        said += capsys.readouterr().err.splitlines()
    assert said == [
        f"skirl info: {tmp_path} is a run folder without its config.json: put that back, or remove the folder",
        f"skirl info: {tmp_path / 'config.json'} is damaged: put back a copy of it, or remove {tmp_path}",
    ]


def test_plans_and_costs_are_told_what_they_are(tmp_path: Path, capsys):
    sites, tables = (Site("a", "disk:/fast/rows"), Site("b")), (PlacedTable("user", 1000, 16, Cut.weighted([3, 1])),)
    PlacementPlan(sites, tables).save(tmp_path / "plan.json")
    TablePlan(2, (("t", 4, 8, "sgd"),), (((Piece(0, 0, 4, 0, 8), 1),),)).save(tmp_path / "tables.json")
    found = {name: told(tmp_path / name, capsys) for name in ("plan.json", "tables.json")} | {
        "costs": told(SHIPPED, capsys)
    }
    assert {name: facts["kind"] for name, facts in found.items()} == {
        "plan.json": "plan of a placement", "tables.json": "plan of tables", "costs": "costs of tables",
    }  # fmt: skip
    assert found["plan.json"]["sites"] == {"a": "disk:/fast/rows", "b": "memory"}
    assert found["plan.json"]["tables"] == [{"name": "user", "rows": 1000, "dim": 16}]
    assert (found["tables.json"]["ranks"], found["costs"]["backend"]) == (2, "skirl-cpu")
    assert cli.main(["info", str(tmp_path / "plan.json")]) == 0
    assert "a: disk:/fast/rows" in capsys.readouterr().out
    (tmp_path / "plan.json").write_text((tmp_path / "plan.json").read_text().replace("1000", "1001"))
    assert cli.main(["info", str(tmp_path / "plan.json")]) == 1


def test_lists_of_tables_timelines_and_pages_are_told_what_they_are(tmp_path: Path, capsys):
    listed, page, trace = tmp_path / "mlperf.json", tmp_path / "plan.html", tmp_path / "trace.json"
    listed.write_text(specs_text([TableSpec("user", 1000, 16, 8, 8.0, 8.0)]))
    page.write_text(Page("Rows & caches").html())
    Timeline(trace).close()
    found = {path.name: told(path, capsys) for path in (listed, page, trace)}
    assert [of["kind"] for of in found.values()] == [
        "list of tables", "page for a browser", "timeline of a run, for https://ui.perfetto.dev",
    ]  # fmt: skip
    assert found["plan.html"]["title"] == "Rows & caches"
    assert cli.main(["info", str(listed)]) == 0
    assert "user: 1,000 rows, of 16" in capsys.readouterr().out
    listed.write_text(listed.read_text().replace("1000", "-1"))
    assert cli.main(["info", str(listed)]) == 1
    assert "is a damaged list of tables (tables.0.rows is -1" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["rows", "once"])
def test_the_layout_of_converted_files_is_told(layout: str, tmp_path: Path, capsys):
    rows: list[Row] = [
        {"click": i % 2, "price": 1.0, "item": i, "seen": list(range(i // 2, i // 2 + 30)), "bought": [9], "visit": i // 20,
         "when": i}
        for i in range(200)
    ]  # fmt: skip
    data = write(tmp_path / "in.parquet", rows, 50)
    words = ["--by", "session", "--layout", layout, "--schema", schema(tmp_path)]
    assert cli.main(["convert", "--data", data, "--out", str(tmp_path / "out"), *words, "--quiet"]) == 0
    capsys.readouterr()
    assert told(tmp_path / "out", capsys)["layout"] == layout
    assert cli.main(["info", str(tmp_path / "out")]) == 0
    assert f" {layout}: " in capsys.readouterr().out


def told(path: Path, capsys) -> dict[str, Any]:
    assert cli.main(["info", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_folder_is_as_new_as_its_newest_file(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (0, 1000))
    (tmp_path / "nowhere").symlink_to("gone")
    os.utime(tmp_path, (0, 2000))
    assert made(tmp_path / "a") == "1970-01-01T00:16:40+00:00" and made(tmp_path) == "1970-01-01T00:33:20+00:00"
    (tmp_path / "b").write_text("rewritten in place")
    os.utime(tmp_path / "b", (0, 3000))
    assert made(tmp_path) == made(tmp_path / "b") == "1970-01-01T00:50:00+00:00"


def test_a_run_that_began_from_another_and_saved_nothing(tmp_path: Path, capsys):
    header = tmp_path / "other" / "checkpoint-000003.json"
    header.parent.mkdir()
    header.write_text("{}")
    origin.note(tmp_path / "run", origin.Origin.of("other", header))
    assert cli.main(["info", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "run before its first checkpoint" in said and str(header) in said
    (tmp_path / "run" / origin.NAME).write_text("{}")
    assert cli.main(["info", str(tmp_path / "run")]) == 1
    assert "is damaged" in capsys.readouterr().err
