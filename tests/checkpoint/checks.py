"""Checks of checkpoints, shared by the suite and the planted faults. Together they take seconds."""

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from stat import S_ISDIR
from typing import Any

import numpy as np
import pytest
import torch

import skirl
from skirl.checkpoint import folder as folders
from skirl.checkpoint import numbers
from skirl.checkpoint.keeper import Keeper
from skirl.checkpoint.rows import FrozenCollection
from tests.resume import ROWS, Run, Setup, assert_same
from tests.store.links import behind_a_link
from tests.streams import used_rows


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def on(store: str, folder: Path) -> str:
    return f"disk:{folder}" if store == "disk" else store


def saves(run: Run, folder: Path, steps: list[int], **options: Any) -> list[skirl.Saving]:
    """Train to the end, saving in the background after these steps."""
    found: list[skirl.Saving] = []

    def saved(step: int) -> None:
        if step in steps:
            found.append(run.save(folder, wait=False, **options))

    run.train(saved=saved)
    found[-1].wait()
    return found


def moments(store: str, cache: int, look: tuple[int, ...] = (1, 12, 23)) -> None:
    """A checkpoint after every step, all of them kept, holds exactly that step, and saving does not disturb the run."""
    setup = Setup(ROWS[2], "adamw", "list", batches=12, depth=4, cache=cache)
    whole = Run(setup).train()
    with scratch() as folder:
        run = Run(replace(setup, store=on(store, folder / "rows")))
        found = saves(run, folder / "c", list(range(1, 25)), keep_last=24)
        assert_same(run, whole)
        assert [saving.number for saving in found] == numbers(folder / "c") == list(range(1, 25))
        run.model.rows.close()
        for n in look:
            resumed = Run(replace(setup, store=on(store, folder / f"rows {n}")))
            resumed.load(folders.header(folder / "c", n))
            assert resumed.begun == n
            assert_same(resumed.train(), whole)
            resumed.model.rows.close()


def held_up() -> None:
    """A writer that is held up for many steps, while all rows change, leave and come back, still saves the right step."""
    go, setup = threading.Event(), Setup(batches=12)
    real = FrozenCollection.write

    def slow(frozen: FrozenCollection) -> Any:
        assert go.wait(20)
        return real(frozen)

    whole = Run(setup).train()
    with scratch() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrozenCollection, "write", slow)
        run = Run(setup)
        begun: list[skirl.Saving] = []

        def saved(step: int) -> None:
            if step == 7:
                begun.append(run.save(folder, wait=False))
            if step == 20:
                assert not begun[0].done and not numbers(folder)
                go.set()

        run.train(saved=saved)
        begun[0].wait()
        assert_same(run, whole)
        assert_same(Run(setup).load(folder).train(), whole)


def chain(store: str) -> None:
    """Save, resume, save, resume: rows that have not changed stay in files of earlier checkpoints."""
    setup = Setup(batches=10, passes=2, cache=200)
    whole = Run(setup).train()
    with scratch() as folder:
        for part, (begun, steps) in enumerate([(0, [2, 4]), (4, [5, 6]), (6, [8]), (8, [9, 14])]):
            run = Run(replace(setup, store=on(store, folder / str(part))))
            if begun:
                run.load(folder / "c")
                assert run.begun == begun
            saves(run, folder / "c", steps, keep_last=2)
            assert_same(run, whole)
            run.model.rows.close()
            assert len(numbers(folder / "c")) == 2
        resumed = Run(replace(setup, store=on(store, folder / "last"))).load(folder / "c")
        assert_same(resumed.train(), whole)
        resumed.model.rows.close()


def gaps() -> None:
    """With any steps between two checkpoints, some without a backward, each checkpoint holds all rows as they were then."""
    tables = [skirl.Table("a", 300, 4), skirl.Table("b", 300, 2)]

    def made() -> skirl.EmbeddingBagCollection:
        return skirl.EmbeddingBagCollection(tables, optimizer=skirl.Adagrad(lr=0.1), cache=60, seed=4)

    rng, rows, states = np.random.default_rng(0), made(), list[dict[int, bytes]]()
    with scratch() as folder:
        for i in range(60):
            ids = torch.from_numpy((rng.random((8, 2)) ** 2 * 200).astype(np.int64))
            out = rows(skirl.KeyedJagged.one_hot(["a", "b"], ids))
            if i % 3:
                (out["a"].sum() + out["b"].square().sum()).backward()
            if i % 4 == 2 or i % 13 == 0:
                skirl.save(folder, model=rows, keep_last=99)
                states.append(used_rows(rows.engine))
        for n, expected in enumerate(states, start=1):
            other = made()
            skirl.load(folders.header(folder, n), model=other)
            assert used_rows(other.engine) == expected, f"checkpoint {n}"


def slow_writes() -> None:
    """Rows that have left the cache and are on their way to the store are saved too: they are nowhere else."""
    setup = Setup(batches=6, passes=1)
    whole = Run(setup).train()
    with scratch() as folder:
        with behind_a_link("1Gbit,30ms"):
            slow = Run(setup)
        saves(slow, folder, [5])
        assert_same(Run(setup).load(folder).train(), whole)


def synced(store: str) -> None:
    """A header gets its name only after it and all that it names are synced; then the folder is synced."""
    done: set[tuple[int, int, int]] = set()
    after: list[Any] = []
    fsync, rename = os.fsync, os.replace

    def identity(of: Any) -> tuple[int, int, int]:
        stat = os.stat(of)  # with the size, because the system reuses inode numbers of deleted files
        return stat.st_dev, stat.st_ino, 0 if S_ISDIR(stat.st_mode) else stat.st_size

    def noted_fsync(file: int) -> None:
        fsync(file)
        done.add(identity(file))
        after.append(identity(file))

    def noted_rename(old: Any, new: Any) -> None:
        if Path(new).name.startswith("checkpoint-"):
            body, folder = json.loads(Path(old).read_text()), Path(new).parent
            files = [path for name in folders.files(body) for path in [folder / name, *(folder / name).glob("*")]]
            missing = [str(path) for path in [*files, folder, Path(old), folder / "rows"] if identity(path) not in done]
            assert not missing, f"renamed before these were synced: {missing}"
            after.clear()
        rename(old, new)

    with scratch() as folder, pytest.MonkeyPatch.context() as patch:
        run = Run(Setup(batches=10, passes=1, store=on(store, folder / "rows")))
        patch.setattr(os, "fsync", noted_fsync)
        patch.setattr(os, "replace", noted_rename)
        saves(run, folder / "c", [6, 9])
        assert run.model.rows.engine.counters.written
        patch.undo()
        assert identity(folder / "c") in after, "the rename of the header does not last"
        run.model.rows.close()


def damage(store: str) -> None:
    """With a flipped bit in any file of the newest checkpoint, the one before it is loaded, and later saves build on it."""
    setup = Setup(batches=8, passes=1)
    whole = Run(setup).train()
    with scratch() as folder:
        run = Run(replace(setup, store=on(store, folder / "rows")))
        saves(run, folder / "c", [2, 4, 6], keep_last=3)
        run.model.rows.close()
        body = [folders.files(folders.read(folders.header(folder / "c", n))) for n in (2, 3)]
        for name in [*sorted(body[1] - body[0]), "checkpoint-000003.json"]:
            copy = folder / "copy"
            shutil.copytree(folder / "c", copy)
            path = copy / name if (copy / name).is_file() else copy / name / "model.safetensors"
            raw = bytearray(path.read_bytes())
            raw[-2] ^= 1
            path.unlink()
            path.write_bytes(raw)
            run = Run(replace(setup, store=on(store, folder / "other"))).load(copy)
            assert run.begun == 4, name
            assert_same(run.train(), whole)
            run.save(copy, keep_last=2)
            assert numbers(copy) == [2, 4], "the damaged one is no longer one to count on"
            run.model.rows.close()
            shutil.rmtree(copy)
            shutil.rmtree(folder / "other", ignore_errors=True)


def older_start() -> None:
    """A start that is no longer the newest adds and removes nothing, whenever it finds out."""
    setup, real = Setup(batches=6, passes=1), FrozenCollection.write

    with scratch() as folder, pytest.MonkeyPatch.context() as patch:
        older = Run(setup).train()
        older.save(folder)
        theirs = folder / "dense-0123456789abcdef"  # written by a newer start, which has not named it yet
        draft = folder / "checkpoint-000002.json-0123456789abcdef.tmp"
        draft.touch()

        def overtaken(frozen: FrozenCollection) -> Any:
            patch.undo()
            assert folders.claim(folder) == 2 and not draft.exists()
            theirs.mkdir()
            return real(frozen)

        patch.setattr(FrozenCollection, "write", overtaken)
        for _ in range(2):  # first when it writes its header, then at once
            with pytest.raises(folders.Superseded, match="belongs to a newer start of the run, and this is start 1"):
                older.save(folder)
            assert numbers(folder) == [1] and theirs.is_dir()
        newer = Run(setup).load(folder)
        newer.save(folder)
        assert [path.name for path in folder.glob("start-*")] == ["start-000003"] and not theirs.exists()
        assert folders.read(folders.header(folder, 2))["start"] == 3


def two_that_resume() -> None:
    """Of two starts that resume at the same time, the later one owns the folder, whichever saves first."""
    setup = Setup(batches=3, passes=1)

    def kept(run: Run, folder: Path) -> Keeper:
        return Keeper(folder, resume=True, keep=9, model=run.model, optimizers=run.parts, data=run.batches)

    def train(run: Run, keeper: Keeper) -> None:
        def saved(step: int) -> None:
            keeper.after_step(last=True)

        keeper.begin()
        run.train(saved=saved)

    for begun in (0, 1):
        with scratch() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr("skirl.checkpoint.keeper.launched_here", lambda: True)  # by launchers of two machines
            if begun:
                Run(setup).train(1, saved=lambda step, to=folder: to)
            older, newer = Run(setup), Run(setup)
            with kept(older, folder) as old:
                with kept(newer, folder) as new:
                    with pytest.raises(folders.Superseded, match=rf"a newer start of .* start {1 + begun}: end"):
                        old.check()
                    train(newer, new)
                    new.check()
                there = numbers(folder)
                with pytest.raises(folders.Superseded, match="belongs to a newer start of the run"):
                    train(older, old)
            assert numbers(folder) == there and len(there) == 4 - begun
            assert {folders.read(folders.header(folder, n))["start"] for n in there[begun:]} == {2 + begun}
            folders.header(folder, there[-1]).write_text("damaged")
            with kept(Run(setup), folder):  # drops the damaged one: found whole later, it would hide this start's
                assert numbers(folder) == there[:-1]


CHECKS: dict[str, Callable[[], None]] = {
    "held up": held_up,
    "gaps": gaps,
    "moments": lambda: moments("memory", 120),
    "moments on disk": lambda: moments("disk", 400),
    "chain": lambda: chain("memory"),
    "chain on disk": lambda: chain("disk"),
    "slow writes": slow_writes,
    "synced": lambda: synced("memory"),
    "synced on disk": lambda: synced("disk"),
    "older start": older_start,
    "two that resume": two_that_resume,
    "damage": lambda: damage("memory"),
    "damage on disk": lambda: damage("disk"),
}
