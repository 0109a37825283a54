"""The folder of a run that is started again, while an older start of it may still write."""

import json

import pytest

from skirl.train.report.run_folder import METRICS, _cut, lines_of
from skirl.train.report.sinks import Lines


@pytest.mark.parametrize("full", [False, True])
def test_an_older_start_writes_no_lines_into_the_newer_ones(tmp_path, monkeypatch, full):
    path = tmp_path / METRICS
    older = Lines(path)
    for step in range(1, 6):
        older.write({"kind": "train", "step": step})
    if full:
        monkeypatch.setattr("pathlib.Path.write_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    _cut(path, 3)
    newer = Lines(path)
    newer.write({"kind": "train", "step": 4, "of": "newer"})
    if not full:
        with pytest.raises(FileNotFoundError):
            older.write({"kind": "train", "step": 6})
    older.close()
    newer.close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in found] == [1, 2, 3, 4] and found[-1]["of"] == "newer"
    assert lines_of(tmp_path) == found
