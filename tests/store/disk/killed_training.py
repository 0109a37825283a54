"""Training runs over a store on disk that are killed: `python -m tests.store.disk.killed_training FOLDER KILLS SEED`.

Each process resumes from the last checkpoint, trains, saves now and then, and is killed at a random moment. It keeps a
journal next to the store: what was appended to the store's logs, and each point just before its manifest is renamed.
Writes survive a kill without a sync, so the journal says what every point held, and the store is compared with the last
of them. In the end the run that was killed so often is compared, bit by bit, with one that never was. Prints one line
per kill.
"""

import os
import pickle
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skirl.checkpoint import numbers
from skirl.store import DiskStore
from skirl.store.disk import log as log_module
from skirl.store.disk import log as room_module
from skirl.store.disk.log import Log
from skirl.store.disk.manifest import NAME, Manifest
from skirl.store.disk.os_files import OsFiles
from tests.killed import ENDLESS, ended, forked
from tests.resume import Run, assert_same
from tests.store.conformance import contents

SAVED_EVERY = 9
"""Mean number of steps between saves."""


def keep_journal(path: Path, store: DiskStore) -> None:
    """From now on, record the rows that a store is given, and its points."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    append, rename = Log.append, OsFiles.rename

    def note(*entry: Any) -> None:
        os.write(file, pickle.dumps(entry))

    def noted_append(log: Log, keys: np.ndarray, rows: np.ndarray) -> None:
        note("rows", dict(zip(keys.tolist(), (row.tobytes() for row in rows.reshape(keys.size, -1)), strict=True)))
        append(log, keys, rows)

    def noted_rename(files: OsFiles, old: Path, new: Path) -> None:
        if new == store.path / NAME:
            note("point", old.read_bytes())
        rename(files, old, new)

    note("rows", contents(store))
    note("point", (store.path / NAME).read_bytes())
    Log.append, OsFiles.rename = noted_append, noted_rename  # type: ignore[method-assign]


def points(path: Path) -> Iterator[tuple[bytes, dict[int, bytes]]]:
    """Yield the manifest and the rows of each point in a journal. The last entry may be cut off."""
    content: dict[int, bytes] = {}
    with path.open("rb") as file:
        while True:
            try:
                what, value = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return
            if what == "rows":
                content.update(value)
            else:
                yield value, dict(content)


def resumed(folder: Path) -> Run:
    """Return a run that resumes from its last checkpoint, over the store that the killed process left."""
    run = Run(replace(ENDLESS, store=f"disk:{folder / 'rows'}", resume=True))
    return run.load(folder / "checkpoint") if numbers(folder / "checkpoint") else run


def trains(folder: Path, seed: int) -> Callable[[Callable[[], object]], None]:
    """Return the work of the process that is killed."""

    def child(begins: Callable[[], object]) -> None:
        rng, run = random.Random(seed), resumed(folder)
        store = run.model.rows.engine.store
        assert isinstance(store, DiskStore)
        keep_journal(folder / "journal", store)

        def saved(step: int) -> Path | None:
            if step == run.begun + 2:  # one save is complete, so that each process gets further than the one before
                begins()
            return folder / "checkpoint" if step <= run.begun + 2 or rng.random() < 1 / SAVED_EVERY else None

        run.train(saved=saved)

    return child


def compares(folder: Path) -> Callable[[Callable[[], object]], None]:
    """Return the work of a process that opens what was left, and compares it."""

    def child(begins: Callable[[], object]) -> None:
        noted = list(points(folder / "journal"))[-2:]  # the last one may not have been renamed
        found = (folder / "rows" / NAME).read_bytes()
        content = next(content for header, content in reversed(noted) if header == found)
        with DiskStore(folder / "rows", Manifest.read(folder / "rows" / NAME).layout) as store:
            store.check()
            assert contents(store) == content, "the rows are not those of the last point"
            where = "at the last point" if found == noted[-1][0] else "before the last rename"
            print(f"killed; {len(content)} rows as they were {where}, generation {store.generation}", flush=True)

    return child


def goes_on(folder: Path) -> Callable[[Callable[[], object]], None]:
    """Return the work of a process that trains a little further and compares with a run that was never killed."""

    def child(begins: Callable[[], object]) -> None:
        run = resumed(folder)
        run.train(until=run.begun + 5)
        assert_same(run, Run(ENDLESS).train(until=run.begun + 5))
        print(f"resumed at step {run.begun}, with the bits of a run that was never killed", flush=True)

    return child


def main() -> None:
    torch.set_num_threads(1)
    room_module.SLACK, log_module.SMALLEST = 0, 16  # cleaned at every second write
    folder, kills, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    model = Run(replace(ENDLESS, store=f"disk:{folder / 'warm'}")).model
    for i in range(30):  # without a lookahead there are no threads: compile everything now
        model.loss(ENDLESS.data.batch(i)).backward()
    model.rows.flush()
    model.rows.close()
    shutil.rmtree(folder / "warm")
    for _ in range(kills):
        pid, reading = forked(trains(folder, rng.getrandbits(30)))
        time.sleep(rng.uniform(0, 0.3))
        os.kill(pid, signal.SIGKILL)
        assert ended(pid, reading) == -signal.SIGKILL
        assert ended(*forked(compares(folder))) == 0
    assert ended(*forked(goes_on(folder))) == 0


if __name__ == "__main__":
    main()
