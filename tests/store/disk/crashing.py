"""Crash stores: what a store was asked to do, what may be found after the crash, and whether it is.

`crash_all` crashes long random workloads at random calls, `crash_everywhere` short scripted ones at every call. The
first finds what nobody thought of, the second is sure to find what somebody did.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skirl.store import DiskStore, MemoryStore
from skirl.store.base import Frozen
from skirl.store.disk import log
from skirl.store.disk import manifest as manifests
from skirl.store.disk.os_files import OsFiles, explained
from skirl.tools.sealed_json import CheckpointError, seal
from tests.store import frozen
from tests.store.conformance import LAYOUT, TABLES, contents, random_rows, table_keys
from tests.store.crash import Disk, NoLinks, Recorder, Unsynced


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use segments of a few records without slack: every second write cleans, and makes a point that nobody asked for."""
    monkeypatch.setattr(log, "SLACK", 0)
    monkeypatch.setattr(log, "SMALLEST", 16)


@dataclass
class Point:
    """A header that was renamed into place: it may be found from then on, and is durable once it or a later one is `done`.

    The header is a store's manifest, or that of frozen rows.
    """

    header: Path
    at: int
    content: dict[int, bytes]
    generation: int
    done: int | None = None


class Copying(NoLinks, Recorder):
    pass


def finish(state: Frozen, folder: Path, files: OsFiles) -> None:
    """Write frozen rows and their header, as a checkpoint does. Then remove what the header does not name."""
    facts = state.write()
    state.release()
    manifests.replace(files, folder, frozen.HEADER, seal(frozen.body_of(facts)))
    manifests.remove_but(files, folder, frozen.files_of(facts))


class Workload:
    """Random calls on a recorded store, and the contents that it may have after a crash."""

    def __init__(self, root: Path, rng: np.random.Generator, recorder: type[Recorder], counts: Counter) -> None:
        self.root, self.rng, self.counts = root, rng, counts
        self.room = float(rng.choice([1.3, 3, 8]))  # cleans at almost every write, or keeps older points for long
        self.points: list[Point] = []
        self.content: dict[int, bytes] = {}
        self.frozen: dict[Path, dict[int, bytes]] = {}
        self.state: tuple[Frozen, Path, dict[int, bytes]] | None = None
        for header in sorted(root.glob(f"frozen?/{frozen.HEADER}")):
            found = try_thaw(root, header.parent)
            assert found is not None
            self.frozen[header.parent] = found[0]
            self.points.append(Point(header, -1, *found, done=-1))
        held = (root / "store" / "store.json").is_file()
        self.files = recorder(root)
        self.files.on_rename = self.renamed
        self.store = self.open()
        self.content = contents(self.store)
        if held:
            header = root / "store" / "store.json"
            self.points.append(Point(header, -1, dict(self.content), self.store.generation, done=-1))
        self.finished()

    def open(self) -> DiskStore:
        roomy = type("Roomy", (DiskStore,), {"share": self.room})
        return roomy(self.root / "store", LAYOUT, files=self.files)

    def renamed(self, header: Path) -> None:
        generation = json.loads(header.read_text())["facts"]["generation"]
        content = self.content if self.state is None or header.name != frozen.HEADER else self.state[2]
        self.points.append(Point(header, len(self.files.ops), dict(content), generation))

    def finished(self) -> None:
        for point in self.points:
            if point.done is None:
                point.done = len(self.files.ops)

    def run(self, calls: int) -> None:
        names = ["write", "flush", "freeze", "finish", "thaw", "kill", "close"]
        self.do(self.rng.choice(names, calls, p=[0.58, 0.12, 0.09, 0.09, 0.02, 0.05, 0.05]).tolist())

    def do(self, names: Iterable[str]) -> None:
        for name in names:
            points = len(self.points)
            getattr(self, name)()
            self.finished()
            self.counts[name] += 1
            self.counts["own points"] += len(self.points) - points if name == "write" else 0

    def write(self) -> None:
        table = int(self.rng.choice(TABLES))
        n = int(self.rng.integers(1, 20))
        self.put(table, self.rng.choice(30, n, replace=False))

    def overwrite(self) -> None:
        """Overwrite all rows of a table, so that their old segments become garbage."""
        self.put(0, np.arange(30))

    def put(self, table: int, numbers: np.ndarray) -> None:
        keys, rows = table_keys(table, numbers), random_rows(table, len(numbers), int(self.rng.integers(1 << 30)))
        self.store.write(keys, rows)
        self.content.update((k, row.tobytes()) for k, row in zip(keys.tolist(), rows, strict=True))

    def flush(self) -> None:
        self.store.flush()

    def freeze(self) -> None:
        """Freeze the rows held now, for a later header. An earlier frozen state without a header is released."""
        if self.state:
            self.state[0].release()
        folder = self.root / f"frozen{self.rng.integers(2)}"
        self.state = self.store.freeze(folder, None), folder, dict(self.content)

    def finish(self) -> None:
        if not self.state:
            self.freeze()
        assert self.state
        state, folder, content = self.state
        finish(state, folder, self.files)
        self.frozen[folder], self.state = content, None

    def thaw(self) -> None:
        if self.frozen:
            folder = sorted(self.frozen)[int(self.rng.integers(len(self.frozen)))]
            self.content = dict(self.frozen[folder])
            frozen.thaw(self.store, folder, frozen.facts_in(folder))

    def adopt(self) -> None:
        """Load the frozen state of a store in memory."""
        folder, copy = self.root.with_name("memory"), self.root / "memory"
        with MemoryStore(LAYOUT) as memory:
            for table in TABLES[:2]:
                keys = table_keys(table, self.rng.choice(30, 9, replace=False))
                memory.write(keys, random_rows(table, 9, int(self.rng.integers(1 << 30))))
            facts = frozen.save(memory, folder)
            self.content = contents(memory)
        self.files.make_folder(copy)
        for path in folder.iterdir():
            self.files.put(copy / path.name, path.read_bytes())
        self.files.sync_folder(copy)
        shutil.rmtree(folder)
        frozen.thaw(self.store, copy, facts)
        for path in list(copy.iterdir()):
            self.files.remove(path)

    def kill(self) -> None:
        self.store._let_go()
        self.state = None
        self.store = self.open()
        self.content = dict(max((p for p in self.points if p.header.name == "store.json"), key=lambda p: p.at).content)
        assert contents(self.store) == self.content

    def close(self) -> None:
        self.store.close()
        self.store = self.open()
        assert contents(self.store) == self.content

    def allowed(self, header: Path, k: int) -> tuple[list[Point], bool]:
        """Return the points that may be found at `header` after k calls, and whether one of them must be."""
        begun = [p for p in self.points if p.header == header and p.at < k]
        last = max((i for i, p in enumerate(begun) if p.done is not None and p.done <= k), default=None)
        return begun[last or 0 :], last is not None


def try_thaw(root: Path, folder: Path) -> tuple[dict[int, bytes], int] | None:
    """Return the rows frozen in a folder; None if it has no header."""
    other = DiskStore(root / "other", LAYOUT, files=Unsynced())
    try:
        frozen.load(other, folder)
        return contents(other), other.generation
    except CheckpointError as error:
        assert f"{frozen.HEADER} is missing" in str(error)
        return None
    finally:
        other._let_go()
        shutil.rmtree(root / "other")


def killed_and_opened(disk: Disk, rng: np.random.Generator, root: Path) -> Disk:
    """Kill, reopen, and then lose power: writes that the first process did not sync may still be lost."""
    disk.killed().write_to(root)
    files = Recorder(root, disk)
    DiskStore(root / "store", LAYOUT, files=files)._let_go()
    shutil.rmtree(root)
    return files.disk(int(rng.integers(len(files.ops) + 1))).power_off(rng)


FROZEN = ("frozen0", "frozen1")
Held = tuple[dict[int, bytes], int]
"""The rows found, and their generation."""


Known = dict[object, Held | None]
"""The rows found in each part of a disk: the store, and each folder of frozen rows. Most crashes change only one part."""


def part_of(found: Any, folder: str) -> object:
    """Return what a process can find in a folder, including which names share a file. found: all that is on the disk."""
    folders, names = found
    inside = [path for path in folders if path.parts[0] == folder]
    return folder, tuple(inside), tuple(name for name in names if name[0].parts[0] == folder)


def check(store: DiskStore) -> None:
    """Read every record and verify its checksum."""
    with explained(store.path):
        for each in store._logs:
            for segment in each.segments.values():
                list(each.records_of(segment))


def found_on(disk: Disk, root: Path, known: Known) -> tuple[Held, list[Held | None]]:
    """Open the store and thaw the frozen rows on a disk after a crash."""
    disk.write_to(root)
    on_disk = disk.as_found()
    parts = {folder: part_of(on_disk, folder) for folder in ("store", *FROZEN)}
    if parts["store"] not in known:
        with DiskStore(root / "store", LAYOUT, files=Unsynced()) as store:
            check(store)
            known[parts["store"]] = contents(store), store.generation
    for folder in FROZEN:
        if parts[folder] not in known:
            known[parts[folder]] = try_thaw(root, root / folder)
    found = known[parts["store"]]
    assert found is not None
    return found, [known[parts[folder]] for folder in FROZEN]


def is_allowed(work: Workload, k: int, found: Held, thawed: list[Held | None]) -> None:
    """Check that what was found is something promised to be durable."""
    points, surely = work.allowed(work.root / "store" / "store.json", k)
    assert not surely or found in [(p.content, p.generation) for p in points]
    assert surely or found in [*[(p.content, p.generation) for p in points], ({}, 0)]
    for folder, one in zip(FROZEN, thawed, strict=True):
        points, surely = work.allowed(work.root / folder / frozen.HEADER, k)
        assert one is not None or not surely
        assert one is None or one in [(p.content, p.generation) for p in points]


class UnsyncedCopies(NoLinks, Unsynced):
    pass


def goes_on(root: Path, files: Unsynced, thawed: list[Held | None]) -> None:
    """Check that the rows found can be thawed, and frozen again over what is left of an earlier frozen state."""
    with DiskStore(root / "store", LAYOUT, files=files) as store:
        for folder, found in zip(FROZEN, thawed, strict=True):
            assert (root / folder / frozen.HEADER).is_file() == (found is not None)
            if found:
                frozen.load(store, root / folder)
                assert found == (contents(store), store.generation)
        finish(store.freeze(root / "frozen0", None), root / "frozen0", files)
        assert try_thaw(root, root / "frozen0") == (contents(store), store.generation)


def crash_all(tmp: Path, seed: int, workloads: int, crashes: int) -> Counter:
    """Crash at random calls of random workloads, every second one on a disk that has crashed before."""
    counts = Counter()
    start = tmp / "start"
    for number in range(workloads):
        rng = np.random.default_rng((seed, number))
        if number % 2 == 0:
            shutil.rmtree(start, ignore_errors=True)
            start.mkdir()
        work = Workload(start, rng, Recorder, counts)
        work.run(25)
        work.store._let_go()
        root, known = tmp / "found", Known()
        for crash in range(crashes):
            k = int(rng.integers(len(work.files.ops) + 1))
            renames = [point.at + 1 for point in work.points if point.at >= 0]
            if crash % 10 == 1 and renames:  # between a point and its sync, rarely hit by chance
                k = int(rng.choice(renames))
            disk = work.files.disk(k)
            counts["calls"] += 1
            counts["with writes not synced"] += bool(disk.unsynced)
            counts["with names not synced"] += bool(disk.unnamed)
            if crash % 5 == 0:
                disk = disk.killed()
            elif crash % 5 == 1:
                disk = killed_and_opened(disk, rng, root)
            else:
                disk = disk.power_off(rng)
            is_allowed(work, k, *found_on(disk, root, known))
            if crash < crashes - 1:
                shutil.rmtree(root)
        shutil.rmtree(start)
        root.rename(start)
    return counts


SCRIPTS = [
    "overwrite flush overwrite flush write write freeze kill finish write flush",
    "overwrite flush overwrite freeze finish write flush thaw write kill write close",
    "write flush finish overwrite freeze overwrite finish overwrite finish thaw kill flush",
    "write adopt overwrite flush overwrite freeze write finish overwrite kill thaw close",
]


KINDS: tuple[type[Recorder], ...] = (Recorder, Copying)
"""Frozen rows share files with the store, or are copied."""


def crash_everywhere(tmp: Path, seed: int, script: str, kind: type[Recorder]) -> int:
    """Crash at each call of a workload. Return the number of crashes.

    Most disks result from several crashes: each is opened once, and compared with what each of these crashes may leave.
    Skips the gap between two writes, since after both either may be lost. If nothing awaits a sync, only a kill is
    tried.
    """
    start, root, crashes = tmp / "start", tmp / "found", 0
    start.mkdir()
    rng = np.random.default_rng((seed, 0))
    work = Workload(start, rng, kind, Counter())
    work.do(script.split())
    work.store._let_go()
    seen: dict[object, tuple[Held, list[Held | None]]] = {}
    went_on: set[object] = set()
    known: Known = {}
    for k in range(len(work.files.ops) + 1):
        before, after = ([*work.files.ops[k - 1 : k], ("",)][0][0], [*work.files.ops[k : k + 1], ("",)][0][0])
        if before == after == "write":
            continue
        disk = work.files.disk(k)
        turns = 8 if before == "rename" else 2  # a point not durable yet: most can go wrong
        for turn in range(before.startswith("sync"), 1 + turns * bool(disk.unnamed or disk.unsynced)):
            if turn == 0:
                found = disk.killed()
            elif turn % 2:
                found = killed_and_opened(disk, rng, root)
            else:
                found = disk.power_off(rng)
            same, further = found.as_found(), turn < 2
            if same not in seen or (further and same not in went_on):
                seen[same] = found_on(found, root, known)
                if further:
                    goes_on(root, Unsynced() if kind is Recorder else UnsyncedCopies(), seen[same][1])
                    went_on.add(same)
                shutil.rmtree(root)
            is_allowed(work, k, *seen[same])
            crashes += 1
    shutil.rmtree(start)
    return crashes
