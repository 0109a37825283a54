"""`skirl bench dedup --part convert`: it converts what it says, and tells what was changed."""

import contextlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from skirl import cli
from skirl.dedup import converting
from skirl.dedup.bench import Dedup
from skirl.dedup.converting import CHANGES, told_of


def test_what_is_converted_is_compared_and_changes_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def here(arguments: list[str], env: dict[str, str]) -> Any:
        """In this process, which has imported and compiled what a child would."""
        if arguments[1] == "skirl":
            assert cli.main(arguments[2:]) == 0
            return json.loads(capsys.readouterr().out)
        assert arguments[:2] == ["-m", "skirl.dedup.converting"]
        where, turns = json.loads(arguments[2])
        return converting.compared(Path(where), turns)

    seconds, of_turns = itertools.count(1.0), iter([4.0, 3.0])  # of `skirl same`, then of Arrow
    monkeypatch.setattr(converting, "child", here)
    monkeypatch.setattr(converting, "_of_children", lambda: next(seconds))
    monkeypatch.setattr(converting, "Stopwatch", lambda: contextlib.nullcontext(SimpleNamespace(cpu=next(of_turns))))
    monkeypatch.setattr(converting, "TURNS", 1)
    found = Dedup(("convert",), samples=900, rows_scale=1.0, at_once=(20,)).run()["convert"]
    assert found["same"] and found["told_apart"] == dict.fromkeys(CHANGES, True)
    assert found["bytes"] > 900 * 1000 > found["bytes_out"] > 0
    assert found["peak_bytes"] > 0 < found["peak_bytes_of_quarter"] and found["memory"] == 1 << 30
    assert found["cpu_seconds"] == 1.0 and found["rows_a_cpu_second"] == 900
    assert (found["same_cpu_seconds"], found["arrow_cpu_seconds"], found["same_vs_arrow"]) == (4.0, 3.0, 0.75)
    told = told_of(found)
    assert told["told apart"] == "rows dropped, doubled, changed, swapped" and told["same"].startswith("yes")
    wrong = told_of(found | {"same": False, "told_apart": {"dropped": True, "doubled": False}})
    assert wrong["told apart"] == "rows dropped; missed: doubled" and "please report it" in wrong["same"]


def test_files_have_all_samples_and_sessions_mix(tmp_path: Path) -> None:
    paths = converting._written(tmp_path / "all", 1000, 0.05, 1.0, 20)
    assert len(paths) == converting.FILES
    table = ds.dataset(tmp_path / "all").to_table()
    assert sorted(table.column("time").to_pylist()) == list(range(1000))
    sessions = table.column("session").to_pylist()
    begins = sum(a != b for a, b in itertools.pairwise(sessions))
    assert begins > 3 * len(set(sessions))  # samples of a session do not follow each other
    converting.linked(tmp_path / "some", paths[:2])
    assert sorted(path.name for path in (tmp_path / "some").iterdir()) == ["00.parquet", "01.parquet"]


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_one_row_or_two(what: str, tmp_path: Path) -> None:
    table = pq.read_table(converting._written(tmp_path / "all", 80, 0.05, 1.0, 5)[0])
    changed = CHANGES[what](table)
    assert changed.schema == table.schema
    assert len(changed) - len(table) == {"dropped": -1, "doubled": 1}.get(what, 0)
    before, after = ([tuple(map(str, row.values())) for row in one.to_pylist()] for one in (table, changed))
    lost, new = sorted(set(before) - set(after)), sorted(set(after) - set(before))
    assert (len(lost), len(new)) == {"dropped": (1, 0), "doubled": (0, 0), "changed": (1, 1), "swapped": (2, 2)}[what]
