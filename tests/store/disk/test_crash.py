"""Power loss and kill -9 at any moment: what is found is a durable point, whole, and no older than promised."""

import shutil

import numpy as np
import pytest

from skirl.store import DiskError, DiskStore
from skirl.tools.sealed_json import CheckpointError
from tests.store import frozen
from tests.store.conformance import LAYOUT, contents, random_rows, table_keys
from tests.store.crash import Recorder, Unsynced
from tests.store.disk.crashing import (
    KINDS,
    SCRIPTS,
    Copying,
    check,
    crash_all,
    crash_everywhere,
    finish,
    make_small,
    try_thaw,
)


def test_power_loss_and_kills(tmp_path, monkeypatch, campaign_seed):
    make_small(monkeypatch)
    counts = crash_all(tmp_path, campaign_seed, workloads=12, crashes=30)
    assert counts["calls"] == 360
    assert min(counts[name] for name in ("with writes not synced", "with names not synced")) > 100
    assert counts["own points"] > 30
    assert min(counts[name] for name in ("flush", "freeze", "finish", "kill", "close")) > 5


EACH_WAY = [
    pytest.param(
        script,
        kind,
        id=f"{number}-{kind.__name__}",
        marks=[] if (number, kinds) in ((1, 1), (2, 0)) else pytest.mark.slow,
    )
    for number, script in enumerate(SCRIPTS)
    for kinds, kind in enumerate(KINDS)
]
"""One script in each way; a campaign runs all in both."""


@pytest.mark.parametrize("script, kind", EACH_WAY)
def test_a_crash_at_each_call_of_a_script(script, kind, tmp_path, monkeypatch, campaign_seed):
    make_small(monkeypatch)
    assert crash_everywhere(tmp_path, campaign_seed, script, kind) > 100


class FailsOnce(Recorder):
    """A sync fails, and the system forgets the data to be written, as Linux does: the next sync succeeds."""

    failing = ".rows"

    def sync(self, file):
        if self.failing and self.path_of(file).endswith(self.failing):
            self.failing = None
            self.note("forgotten", self.files[file])
            raise OSError(5, "Input/output error")
        super().sync(file)

    def disk(self, k):
        """Return a disk that the forgotten bytes never reach."""
        ops = list(self.ops[:k])
        for i, op in enumerate(ops):
            if op[0] == "forgotten":
                ops[: i + 1] = [o for o in ops[:i] if not (o[0] == "write" and o[1] == op[1] and self.unsynced(o, i))]
                break
        disk = self.first.copy()
        for op in ops:
            disk.do(op)
        return disk

    def unsynced(self, op, before: int) -> bool:
        at = next(i for i, o in enumerate(self.ops) if o is op)
        return not any(o[:2] == ("sync", op[1]) for o in self.ops[at:before])


@pytest.mark.parametrize("file", [".rows", ".keys"])
@pytest.mark.parametrize("rewritten", [True, False])
def test_what_a_failed_sync_forgot_is_written_again(file, rewritten, tmp_path, monkeypatch):
    root = tmp_path / "root"
    root.mkdir()
    files = FailsOnce(root)
    files.failing = None
    store = DiskStore(root / "store", LAYOUT, files=files)
    store.write(table_keys(0, range(20)), random_rows(0, 20, seed=1))
    store.flush()
    files.failing = file
    store.write(table_keys(0, range(10, 30)), random_rows(0, 20, seed=2))
    with pytest.raises(OSError, match="Input/output"):
        store.flush()
    assert store.generation == 1
    if not rewritten:
        for segment in (s for log in store._logs for s in log.segments.values()):
            segment.suspect = False
    held = contents(store)
    store.flush()
    files.disk(len(files.ops)).power_off(np.random.default_rng(0)).write_to(tmp_path / "found")
    if rewritten:
        with DiskStore(tmp_path / "found" / "store", LAYOUT) as found:
            check(found)
            assert contents(found) == held
    else:
        with pytest.raises(DiskError), DiskStore(tmp_path / "found" / "store", LAYOUT) as found:
            check(found)


class Forgetful(Unsynced):
    """The system lost writes. As on Linux, a sync tells each descriptor that was open then, and no later one."""

    def __init__(self):
        self.paths, self.untold = {}, set()

    def create(self, path):
        file = super().create(path)
        self.paths[file] = path
        return file

    def close(self, file):
        self.paths.pop(file, None)
        self.untold.discard(file)
        super().close(file)

    def lose(self, suffix):
        self.untold |= {file for file, path in self.paths.items() if path.suffix == suffix}

    def sync(self, file):
        if file in self.untold:
            self.untold.remove(file)
            raise OSError(5, "Input/output error")


@pytest.mark.parametrize("file", [".rows", ".keys"])
def test_a_lost_write_of_which_another_descriptor_was_told_first(file, tmp_path):
    files = Forgetful()
    store = DiskStore(tmp_path / "store", LAYOUT, files=files)
    store.write(table_keys(0, range(20)), random_rows(0, 20, seed=1))
    files.lose(file)
    with pytest.raises(OSError, match="Input/output"):
        store.flush()
    assert store.generation == 0
    store.flush()
    assert not any(segment.suspect for log in store._logs for segment in log.segments.values())


class FailsAfter(Unsynced):
    """The rename of a header succeeds, and what follows fails."""

    failing = ""
    renamed = False

    def rename(self, old, new):
        super().rename(old, new)
        self.renamed = new.name == self.failing

    def sync_folder(self, path):
        if self.renamed:
            self.renamed, self.failing = False, ""
            raise OSError(5, "Input/output error")


def test_a_failure_after_the_rename_loses_nothing_and_no_generation_is_used_twice(tmp_path):
    files = FailsAfter()
    store = DiskStore(tmp_path / "store", LAYOUT, files=files)
    store.write(table_keys(0, range(20)), random_rows(0, 20, seed=1))
    first = contents(store)
    finish(store.freeze(tmp_path / "frozen", None), tmp_path / "frozen", files)
    store.write(table_keys(0, range(10, 30)), random_rows(0, 20, seed=2))
    held = contents(store)
    files.failing = "store.json"
    with pytest.raises(OSError, match="Input/output"):
        store.flush()
    assert store.generation == 1
    files.failing = frozen.HEADER
    with pytest.raises(OSError, match="Input/output"):
        finish(store.freeze(tmp_path / "frozen", None), tmp_path / "frozen", files)
    assert try_thaw(tmp_path, tmp_path / "frozen") == (held, 3)
    store.flush()
    assert store.generation == 4 and contents(store) == held
    with DiskStore(tmp_path / "other", LAYOUT) as other:
        other.write(table_keys(0, range(20)), random_rows(0, 20, seed=1))
        frozen.save(other, tmp_path / "second")
    files.failing = "store.json"
    with pytest.raises(OSError, match="Input/output"):
        frozen.load(store, tmp_path / "second")
    assert contents(store) == held and store.generation == 4
    store._let_go()
    with DiskStore(tmp_path / "store", LAYOUT) as again:
        assert contents(again) == first and again.identity == other.identity


@pytest.mark.parametrize(("direction", "damaged"), [("thaw", False), ("thaw", True), ("freeze", False)])
def test_a_short_file_is_replaced_at_one_moment(direction, damaged, tmp_path):
    """A point has the beginning of a segment, and a later frozen state all of it, both in separate files."""
    here, short, long = (tmp_path / name for name in ("store", "frozen0", "frozen1"))
    files = Copying(tmp_path)
    keys, rows = table_keys(0, range(20)), random_rows(0, 20, 1)
    store = DiskStore(here, LAYOUT, files=files)
    store.write(keys[:10], rows[:10])
    store.flush()
    point = contents(store)
    store.write(keys[10:], rows[10:])
    finish(store.freeze(long, None), long, files)
    whole = contents(store)
    store._let_go()
    store = DiskStore(here, LAYOUT, files=files)  # the file is cut at the point
    if direction == "freeze":
        finish(store.freeze(short, None), short, files)
        frozen.load(store, long)
    before = len(files.ops)
    if damaged:
        path = next(long.glob("*.rows"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    if direction == "freeze":
        finish(store.freeze(short, None), short, files)
    elif damaged:
        with pytest.raises(CheckpointError, match=r"record 19.* is damaged"):
            frozen.load(store, long)
        check(store)
        assert contents(store) == point
    else:
        frozen.load(store, long)
        assert contents(store) == whole
    store._let_go()
    rng = np.random.default_rng(0)
    for k in range(before, len(files.ops) + 1):
        for disk in (files.disk(k).killed(), *(files.disk(k).power_off(rng) for _ in range(8))):
            disk.write_to(tmp_path / "found")
            if direction == "thaw":
                with DiskStore(tmp_path / "found" / "store", LAYOUT, files=Unsynced()) as found:
                    check(found)
                    assert contents(found) in (point, whole)
            else:
                thawed = try_thaw(tmp_path / "found", tmp_path / "found" / "frozen0")
                assert thawed is not None
                assert thawed[0] in (point, whole)
            shutil.rmtree(tmp_path / "found")


def test_what_a_killed_process_left_of_a_frozen_state_is_synced_by_the_next(tmp_path):
    """It had linked bytes that are not on disk yet; the next frozen state finds the file in its place, and must sync it."""
    root = tmp_path / "root"
    root.mkdir()
    files, folder = Recorder(root), root / "frozen"
    store = DiskStore(root / "store", LAYOUT, files=files)
    store.write(table_keys(0, range(20)), random_rows(0, 20, seed=1))
    store.flush()
    held = contents(store)
    store.write(table_keys(0, range(20, 40)), random_rows(0, 20, seed=2))
    store.freeze(folder, None)
    store._let_go()
    store = DiskStore(root / "store", LAYOUT, files=files)
    finish(store.freeze(folder, None), folder, files)
    generation = store.generation
    store._let_go()
    for seed in range(30):
        found = tmp_path / str(seed)
        files.disk(len(files.ops)).power_off(np.random.default_rng(seed)).write_to(found)
        assert try_thaw(found, found / "frozen") == (held, generation)
