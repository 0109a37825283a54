"""The best checkpoint of a run: its files belong to the run, whatever had their names before."""

from pathlib import Path

import pytest

from skirl.checkpoint import folder as folders
from skirl.store.disk.os_files import OsFiles
from tests.checkpoint.checks import saves
from tests.resume import ROWS, Run, Setup


@pytest.mark.parametrize("links", [True, False])
def test_a_file_left_by_another_run_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    run = Run(Setup(ROWS[2], "adamw", "list", batches=3, depth=2, cache=120))
    saves(run, tmp_path, [3])
    header = folders.header(tmp_path, folders.numbers(tmp_path)[-1])
    if not links:
        monkeypatch.setattr(OsFiles, "linked", lambda *_: False)
        monkeypatch.setattr(OsFiles, "linked_over", lambda *_: False)
    left = [tmp_path / folders.BEST / name for name in folders.files(folders.read(header))]
    for path in left:
        source = tmp_path / path.name
        for file in (p for p in [source, *source.rglob("*")] if p.is_file()):
            other = path if file == source else path / file.relative_to(source)
            other.parent.mkdir(parents=True, exist_ok=True)
            other.write_bytes(b"of another run")
    own = folders.keep_best(header)
    for path in left:
        files = [p for p in [path, *path.rglob("*")] if p.is_file()]
        assert files
        assert all(p.read_bytes() == (tmp_path / p.relative_to(own)).read_bytes() for p in files)
    run.model.rows.close()
