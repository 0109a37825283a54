"""`skirl bench dedup` on files: it measures the same rows, and names its figures."""

from pathlib import Path

import pytest

from skirl.dedup import reading
from skirl.dedup.generated import rows_of_sessions
from skirl.dedup.sizes import SETTINGS, stored, there, told_of


def test_sizes_of_each_order_and_layout() -> None:
    found = stored(400, 0.05, 1.0, (10,), None)
    writers = {f"{writer} {name}" for writer, given in SETTINGS.items() if there(writer) for name in given}
    assert all(set(of) == writers for of in found["bytes"].values())
    assert {"shuffled", "time_10", "clustered", "once", "once, shifting", "window, shifting"} == set(found["bytes"])
    sizes = {name: of["pyarrow zstd 3, no dictionary"] for name, of in found["bytes"].items()}
    assert sizes["once"] < sizes["shuffled"] and sizes["window, shifting"] < sizes["once, shifting"]
    once, window = found["once"], found["window"]
    assert once["vs_shuffled_default"] > 1 and set(once["vs_time_best"]) == {"10"} and window["vs_once"] > 1
    assert found["mind"] == "missing" and told_of(found)


TOOK = {"rows": [4.0, 6.0], "once": [2.0, 2.0], "window": [1.0, 1.0], "shuffled": [10.0, 6.0]}
"""Seconds of each layout, by turn."""


def test_ratios_are_those_of_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is the slower layout over the faster, as a median over turns."""
    monkeypatch.setattr(reading, "_in_turns", lambda paths, rounds: {name: TOOK[name] for name in paths})
    monkeypatch.setattr(reading, "shuffled_chunks", lambda *args, **given: {"x": 0.9})
    found = reading.read(200, 1.0, 2, "none")
    assert found["vs_rows"] == {"4": 2.5, "9": 2.5} and found["vs_shuffled"] == {"4": 4.0, "9": 4.0}
    assert found["window"] == 5.0 and found["window_vs_once"] == 2.0 and found["shuffled_chunks"] == 0.9
    assert found["rows_a_second"]["4"] == {"rows": 40, "once": 100, "shuffled": 25}
    assert found["rows_a_second"]["shifting"] == {"rows": 40, "once": 100, "window": 200, "shuffled": 25}


def test_only_files_of_the_same_rows_are_timed(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("some", "others")]
    for folder in folders:
        folder.mkdir()
    some, others = (
        reading._files(folder, rows_of_sessions(200, change, 1.0), ("rows", "once"), "none")
        for folder, change in zip(folders, (0.2, 0.7), strict=True)
    )
    took = reading._in_turns(some, 2)
    assert set(took) == {"rows", "once", "shuffled"} and {len(of) for of in took.values()} == {2}
    with pytest.raises(AssertionError, match="the files do not hold the same rows"):
        reading._in_turns({"rows": some["rows"], "once": others["once"]}, 1)
