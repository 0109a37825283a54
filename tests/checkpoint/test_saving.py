"""Checkpoints written alongside training: each of one step, with only what changed, and several in a folder."""

import errno
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

import skirl
from skirl.checkpoint import folder as folders
from skirl.checkpoint import numbers, saving
from skirl.checkpoint.rows import FrozenCollection
from skirl.checkpoint.saving import told_of
from skirl.store import changes
from skirl.store.disk.os_files import OsFiles
from skirl.tools.os_errors import NotWritten
from tests.checkpoint.checks import CHECKS, on, saves
from tests.resume import ROWS, Run, Setup, assert_same


@pytest.mark.parametrize("check", CHECKS)
def test_shared_with_the_planted_faults(check: str) -> None:
    CHECKS[check]()


def test_what_is_set_aside_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training waits for a writer that is too slow, instead of holding ever more rows."""
    monkeypatch.setattr(changes, "MOST_ASIDE", 1000)
    whole, run = Run(Setup()).train(), Run(Setup())
    real = FrozenCollection.write
    monkeypatch.setattr(FrozenCollection, "write", lambda frozen: (threading.Event().wait(0.2), real(frozen))[1])
    aside, changing = [0], changes.Changes.changing
    monkeypatch.setattr(
        changes.Changes, "changing", lambda own, *args: (changing(own, *args), aside.append(own._aside_bytes))[0]
    )
    saves(run, tmp_path, [2, 6, 11])
    engine = run.model.rows.engine
    assert sum(cache.changes.waited for cache in engine.caches) > 0
    widest = max(cache.records.shape[1] for cache in engine.caches) * 4 + 8
    assert 0 < max(aside) <= 1000 + 2 * max(map(len, engine.caches)) * widest
    assert_same(run, whole)
    assert_same(Run(Setup()).load(tmp_path).train(), whole)


def test_only_what_has_changed_is_written(tmp_path: Path) -> None:
    rows = skirl.EmbeddingBagCollection([skirl.Table("a", 100_000, 4)], optimizer=skirl.SGD(lr=0.1), cache=1000)

    def step(first: int, n: int) -> None:
        rows(skirl.KeyedJagged.one_hot(["a"], torch.arange(first, first + n).reshape(-1, 1)))["a"].sum().backward()

    for first in range(0, 50_000, 1000):
        step(first, 1000)
    sizes = [skirl.save(tmp_path, model=rows, keep_last=3).bytes]
    sizes.append(skirl.save(tmp_path, model=rows, keep_last=3).bytes)
    step(0, 500)
    sizes.append(skirl.save(tmp_path, model=rows, keep_last=3).bytes)
    record = 4 * 4 + 8
    assert sizes[0] > 50_000 * record
    assert sizes[1] < 1000 * 16 + 20_000, "nothing but the keys of resident rows"
    assert 500 * record < sizes[2] < 3000 * record + 20_000
    for _ in range(8):  # all rows change again and again: then files are written in full, and the folder stays bounded
        for first in range(0, 50_000, 1000):
            step(first, 1000)
        skirl.save(tmp_path, model=rows, keep_last=2)
    held = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert held < 4.5 * 50_000 * record
    fresh = skirl.EmbeddingBagCollection([skirl.Table("a", 100_000, 4)], optimizer=skirl.SGD(lr=0.1), cache=1000)
    skirl.load(tmp_path, model=fresh)
    ids = skirl.KeyedJagged.one_hot(["a"], torch.arange(50_000).reshape(-1, 1))
    assert torch.equal(fresh.eval()(ids)["a"], rows.eval()(ids)["a"])


def test_a_failure_in_the_background_is_raised_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(Setup()).train(until=3)
    run.save(tmp_path)
    monkeypatch.setattr(saving, "put_whole", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
    failing = run.save(tmp_path, wait=False)
    with pytest.raises(OSError, match="got no new checkpoint, the disk is full"):
        run.save(tmp_path)
    monkeypatch.undo()
    assert failing.done and numbers(tmp_path) == [1]
    assert run.save(tmp_path).number == 2
    assert_same(Run(Setup()).load(tmp_path).train(), Run(Setup()).train())


@pytest.mark.parametrize(("where", "store"), [("definition", "memory"), ("store", "disk"), ("dense", "memory")])
def test_a_save_that_fails_at_once_takes_nothing_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, store: str
) -> None:
    """Rows that the failed save froze have no mark any more. The next save must not assume that they are on disk."""
    run, folder = Run(replace(Setup(), store=on(store, tmp_path / "rows"))), tmp_path / "c"
    target = {
        "definition": (saving, "definition"), "store": (run.model.rows.engine.store, "freeze"),
        "dense": (safetensors.torch, "save_file"),
    }[where]  # fmt: skip
    sentence = (
        rf"^{folder} got no new checkpoint, the disk is full; checkpoint 1 in it stays whole: free some room, and save "
        "again$"
    )

    def fail(*args: Any, **more: Any) -> None:
        if where == "dense":  # its own words
            raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(28)} (os error 28)")
        raise OSError(28, "No space left")

    def saved(step: int) -> None:
        if step in (2, 8):
            run.save(folder)
        elif step == 5:
            with monkeypatch.context() as patched, pytest.raises(NotWritten, match=sentence) as caught:
                patched.setattr(*target, fail)
                run.save(folder)
            assert caught.value.errno == 28 and numbers(folder) == [1]

    run.train(saved=saved)
    run.model.rows.close()
    resumed = Run(replace(Setup(), store=on(store, tmp_path / "again"))).load(folder)
    assert resumed.begun == 8
    assert_same(resumed.train(), Run(Setup()).train())


def test_what_a_killed_export_has_left_goes_a_day_later(tmp_path: Path) -> None:
    names = ["reading-ab_cd123", "reading-of mine", "reading-12345678"]
    for name in names:
        (tmp_path / name / "rows").mkdir(parents=True)
    long_ago = time.time() - folders.LEFT - 60
    for name in names[:2]:
        os.utime(tmp_path / name, (long_ago, long_ago))
    folders.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_a_folder_that_cannot_be_looked_at_is_told_of_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.raises(NotWritten, match="got no new checkpoint, the disk is full; there is none"), told_of(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_closing_waits_for_the_checkpoint(tmp_path: Path) -> None:
    run = Run(Setup()).train(until=3)
    run.save(tmp_path, wait=False)
    run.model.rows.close()
    assert numbers(tmp_path) == [1]
    assert_same(Run(Setup()).load(tmp_path).train(), Run(Setup()).train())


def test_the_dense_part_is_one_of_torch_distributed_checkpoint(tmp_path: Path) -> None:
    import warnings

    from torch.distributed import checkpoint as dcp

    run = Run(Setup()).train(until=3)
    run.save(tmp_path)
    [folder] = tmp_path.glob("dense-*")
    dense = {name: p for name, p in run.model.named_parameters() if p.numel()}
    state = {f"model.state.{name}": torch.zeros_like(p) for name, p in dense.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group was set up
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert all(torch.equal(state[f"model.state.{name}"], p) for name, p in dense.items())


@pytest.mark.parametrize("links", [True, False])
def test_a_best_replaces_a_file_left_by_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    run = Run(Setup(ROWS[2], "adamw", "list", batches=3, depth=2, cache=120))
    saves(run, tmp_path, [3])
    header = folders.header(tmp_path, numbers(tmp_path)[-1])
    if not links:
        monkeypatch.setattr(OsFiles, "linked", lambda *_: False)
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
