import errno
import itertools
import json
import os
import signal
import threading
import time

import numpy as np
import pytest

from skirl.core.tables import MAX_ROWS
from skirl.store import DiskError, DiskFull, DiskStore, Layout, Record, open_store
from skirl.store.disk import log, records
from skirl.store.disk import os_files as files_module
from skirl.store.disk.manifest import NAME
from skirl.store.disk.os_files import OsFiles
from skirl.store.disk.records import HEADER, INDEX_MASK
from skirl.tools.sealed_json import CheckpointError, seal
from tests.store import conformance, frozen
from tests.store.conformance import LAYOUT, TABLES, blank, contents, filled, random_rows, table_keys
from tests.store.crash import NoLinks
from tests.store.disk.crashing import check, make_small
from tests.warm import PIPE

_FSYNC = os.fsync


class Quick(OsFiles):
    def sync(self, file):
        if os.fsync is not _FSYNC:
            super().sync(file)

    def sync_folder(self, path):
        if os.fsync is not _FSYNC:
            super().sync_folder(path)


class TestDiskStore(conformance.StoreConformance):
    files: type[OsFiles] = OsFiles

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path_factory):
        self.root, self.counter = tmp_path_factory.mktemp("stores"), itertools.count()

    def make(self, layout: Layout) -> DiskStore:
        return DiskStore(self.root / str(next(self.counter)), layout, files=self.files())


class TestDiskStoreThatCleans(TestDiskStore):
    """Opened as the engine does it, with the number of rows of each table."""

    files = Quick

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        make_small(monkeypatch)

    def make(self, layout: Layout) -> DiskStore:
        rows = dict.fromkeys(layout.records, MAX_ROWS)
        return DiskStore(self.root / str(next(self.counter)), layout, rows=rows, files=self.files())


class Copying(NoLinks, Quick):
    pass


class TestDiskStoreThatCopies(TestDiskStore):
    files = Copying


def held_then_reopened(store: DiskStore, **more) -> tuple[dict[int, bytes], DiskStore]:
    """Return what a store holds, close it, and return it reopened."""
    held = contents(store)
    store.close()
    return held, DiskStore(store.path, store.layout, **more)


# Reopening


def test_reopens_with_rows_identity_and_generation(tmp_path):
    store = open_store(f"disk:{tmp_path / 'deep' / 'store'}", LAYOUT)
    assert isinstance(store, DiskStore) and store.generation == 0
    for table in TABLES:
        store.write(table_keys(table, np.arange(50) * 97), random_rows(table, 50, table))
    store.flush()
    store.flush()  # nothing new, so no new point
    assert store.generation == 1
    held, again = held_then_reopened(store)
    assert contents(again) == held and (again.identity, again.generation) == (store.identity, 1)
    again.write(np.array([0]), random_rows(0, 1, seed=3))
    held, third = held_then_reopened(again)
    assert contents(third) == held and third.generation == 2
    third.close()


def test_what_a_kill_left_behind_is_cut_off_and_removed(tmp_path):
    store = filled(lambda layout: DiskStore(tmp_path / "store", layout))
    store.flush()
    before = store._cleaner.held
    store.write(table_keys(0, np.arange(5000)), random_rows(0, 5000, seed=3))
    store._let_go()
    assert sum(p.stat().st_size for p in store.path.glob("*.*s")) > before
    with DiskStore(tmp_path / "store", LAYOUT) as again:
        assert sum(p.stat().st_size for p in store.path.glob("*.*s")) == again._cleaner.held == before


def test_an_empty_store_that_takes_another_layout_removes_what_a_kill_left_behind(tmp_path):
    killed = filled(lambda layout: DiskStore(tmp_path / "store", layout))  # no durable point
    killed._let_go()
    assert any(killed.path.glob("*.rows"))
    with DiskStore(tmp_path / "store", {0: Record(77)}) as store:
        assert {p.name for p in store.path.iterdir()} == {NAME, "lock"}
        store.write(np.array([5]), np.ones((1, 77), np.float32))
    with DiskStore(tmp_path / "store", {0: Record(77)}) as again:
        assert len(again) == 1


def test_many_short_lives_leave_few_files(tmp_path):
    for i in range(40):
        with DiskStore(tmp_path / "store", LAYOUT) as store:
            store.write(table_keys(0, range(i, i + 10)), random_rows(0, 10, i))
    assert len(list(store.path.iterdir())) < 8


def test_rows_that_a_failed_sync_may_have_lost_are_written_again_before_they_are_frozen(tmp_path):
    store = DiskStore(tmp_path / "store", LAYOUT)
    store.write(np.array([5]), random_rows(0, 1, seed=1))
    segment = next(iter(store._logs[LAYOUT.kinds.index(LAYOUT.records[0])].segments.values()))
    segment.suspect = True
    facts = frozen.save(store, tmp_path / "frozen")
    assert facts["segments"] and not any(text.startswith(segment.name) for text in facts["segments"])
    point = contents(store)
    store.write(np.array([6]), random_rows(0, 1, seed=2))  # into a segment that is not frozen
    frozen.load(store, tmp_path / "frozen")
    assert contents(store) == point


# Refusals


def test_a_file_or_a_folder_of_others_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(DiskError, match=r"holds other files, such as 'thesis.tex'.*empty folder"):
        DiskStore(tmp_path, LAYOUT)
    with pytest.raises(DiskError, match=r"is a file: name a new or an empty folder"):
        DiskStore(tmp_path / "thesis.tex", LAYOUT)
    assert os.listdir(tmp_path) in (["thesis.tex", "lock"], ["lock", "thesis.tex"])


def test_other_tables_are_refused(tmp_path):
    filled(lambda layout: DiskStore(tmp_path, layout)).close()
    with pytest.raises(DiskError, match=r"has records .* the tables need .*or name another folder"):
        DiskStore(tmp_path, {0: Record(5)})
    DiskStore(tmp_path, LAYOUT).close()  # and the refused one leaves no lock behind


def test_rows_beyond_their_table_are_refused(tmp_path):
    sizes = dict.fromkeys(TABLES, 10000)
    store = filled(lambda layout: DiskStore(tmp_path / "store", layout, rows=sizes))
    held = contents(store)
    with pytest.raises(ValueError, match=r"row 10000 of table 0 is beyond the 10,000 rows that it has here: open"):
        store.write(np.array([3, 10_000]), blank(0, 2))
    assert contents(store) == held
    frozen.save(store, tmp_path / "frozen")
    held, again = held_then_reopened(store, rows=sizes)
    assert contents(again) == held
    again.close()
    few = sizes | {0: 5}
    with pytest.raises(DiskError, match=r"\.keys is damaged, or row \d+ of table 0 is beyond the .*: give the table"):
        DiskStore(tmp_path / "store", LAYOUT, rows=few)
    with DiskStore(tmp_path / "other", LAYOUT, rows=few) as other:
        with pytest.raises(CheckpointError, match=r"frozen/.* of table 0 is beyond the 5 rows that it has here"):
            frozen.load(other, tmp_path / "frozen")
        assert not contents(other)
    with pytest.raises(ValueError, match="rows names no table 0: give the rows of each table, or of none"):
        DiskStore(tmp_path / "third", LAYOUT, rows={1: 7})


HOLD = (
    "import sys, time; from skirl.store import DiskStore\n"
    "from tests.store.conformance import LAYOUT\n"
    "s = DiskStore(sys.argv[1], LAYOUT); print('open', flush=True); time.sleep(600)"
)
"""A program that keeps a store open until it is killed."""


def test_a_store_in_use_is_refused_and_waits_for_a_process_that_is_about_to_end(python, tmp_path):
    """As one that is killed with the process that started it, just before that one is started again."""
    with DiskStore(tmp_path, LAYOUT), pytest.raises(DiskError, match=f"in use by process {os.getpid()} on "):
        DiskStore(tmp_path, LAYOUT)
    with python.start(HOLD, str(tmp_path), stdout=PIPE) as child:
        assert child.stdout.readline() == "open\n"
        with pytest.raises(DiskError, match=f"in use by process {child.pid} on .*: close it there first"):
            DiskStore(tmp_path, LAYOUT)
        threading.Timer(0.3, child.kill).start()
        DiskStore(tmp_path, LAYOUT).close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_may_not_use_it_and_does_not_keep_the_lock(tmp_path):
    store = filled(lambda layout: DiskStore(tmp_path, layout))
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store.write(np.array([0]), blank(0, 1))
        except ValueError as error:
            os.write(writing, b"+" if "forked" in str(error) else b"-")
        time.sleep(600)
        os._exit(0)
    try:
        assert os.read(reading, 1) == b"+"
        held, again = held_then_reopened(store)
        assert contents(again) == held
        again.close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


def test_other_versions_are_refused_by_name(tmp_path):
    store = filled(lambda layout: DiskStore(tmp_path, layout))
    store.close()
    header = tmp_path / "store.json"
    body = json.loads(header.read_text())
    del body["~sha256"]
    header.write_bytes(seal(body | {"format_version": 99, "skirl": "9.9"}))
    with pytest.raises(DiskError, match=r"written by skirl 9.9 in format 99.*: use the version that wrote it"):
        DiskStore(tmp_path, LAYOUT)


# Damage


def test_every_flipped_bit_is_found_and_named(tmp_path):
    """In any file, at any place: refused when opened, or named when its row is read. It never gives another row's bits."""
    store = filled(lambda layout: DiskStore(tmp_path, layout), n=30)
    held, rng, named = contents(store), np.random.default_rng(0), 0
    store.close()
    for path in sorted(p for p in tmp_path.iterdir() if p.name != "lock"):
        data = path.read_bytes()
        for at in sorted({0, HEADER, len(data) - 1, *rng.integers(0, len(data), 30).tolist()}):
            flipped = bytearray(data)
            flipped[at] ^= 1 << int(rng.integers(8))
            path.write_bytes(flipped)
            try:
                again = DiskStore(tmp_path, LAYOUT)
            except DiskError as error:
                assert path.name in str(error) and "load a checkpoint" in str(error)
                assert path.suffix != ".keys" or at < HEADER or "its keys are not those" in str(error)
                continue
            assert path.suffix == ".rows"
            with pytest.raises(DiskError, match=rf"{path.name}: record \d+, row \d+ of table \d+, is damaged"):
                check(again)
            for k, row in held.items():
                out = blank(k >> 48, 1)
                try:
                    assert again.read(np.array([k]), out).all() and out.tobytes() == row
                except DiskError as error:
                    assert f"row {k & ((1 << 48) - 1)} of table {k >> 48}, is damaged" in str(error)
                    named += 1
            again._let_go()
        path.write_bytes(data)
    assert named > 50
    with DiskStore(tmp_path, LAYOUT) as again:
        assert contents(again) == held


def test_records_in_the_wrong_place_are_found(tmp_path):
    """Intact, but of another row, an older version of the row, or from another store."""
    store = DiskStore(tmp_path / "a", {0: Record(4)})
    for seed in (1, 2):
        store.write(np.arange(10), random_rows(0, 10, seed))
    segment = next(iter(store._logs[0].segments.values()))
    stride = 20
    for record in (15, 4):  # another row's, an older version; over record 14, the newest of row 4
        data = os.pread(segment.rows.number, stride, HEADER + record * stride)
        good = os.pread(segment.rows.number, stride, HEADER + 14 * stride)
        os.pwrite(segment.rows.number, data, HEADER + 14 * stride)
        with pytest.raises(DiskError, match="record 14, row 4 of table 0, is damaged"):
            store.read(np.arange(10), blank(0, 10))
        os.pwrite(segment.rows.number, good, HEADER + 14 * stride)
    store.close()
    other = DiskStore(tmp_path / "b", {0: Record(4)})
    other.write(np.arange(20), random_rows(0, 20, seed=1))
    other.close()
    for suffix in ("rows", "keys"):
        mine, theirs = (next((tmp_path / name).glob(f"*.{suffix}")) for name in "ab")
        kept = mine.read_bytes()
        mine.write_bytes(theirs.read_bytes())
        with pytest.raises(DiskError, match=f"{mine.name} does not begin as segment"):
            DiskStore(tmp_path / "a", {0: Record(4)})
        mine.write_bytes(kept)


def test_files_cut_short_or_missing_are_refused_by_name(tmp_path):
    store = filled(lambda layout: DiskStore(tmp_path, layout))
    store.close()
    for path in sorted(p for p in tmp_path.iterdir() if p.name != "lock"):
        data = path.read_bytes()
        for cut in (data[:-1], data[:10], b""):
            path.write_bytes(cut)
            with pytest.raises(DiskError, match=f"{path.name} (has|is damaged|does not begin).*: load a checkpoint"):
                DiskStore(tmp_path, LAYOUT)
        path.unlink()
        with pytest.raises(DiskError, match=f"{path.name} is missing: load a checkpoint"):
            DiskStore(tmp_path, LAYOUT)
        path.write_bytes(data)
    with DiskStore(tmp_path, LAYOUT) as again:
        path = next(iter(again._logs[2].segments.values())).rows_path
        os.truncate(path, 100)
        with pytest.raises(DiskError, match=rf"{path.name}: record \d+, row \d+ of table \d, is missing: .*cut"):
            contents(again)
        with pytest.raises(DiskError, match="cut short"):
            check(again)


def test_cleaning_does_not_hide_damage(tmp_path, monkeypatch):
    make_small(monkeypatch)
    store = DiskStore(tmp_path, {0: Record(4)})
    store.write(np.arange(40), random_rows(0, 40, seed=1))
    position = int(store._logs[0].index.locate(np.array([7]))[0])
    segment = store._logs[0].segments[position >> 20]
    os.pwrite(segment.rows.number, b"\0", HEADER + 20 * (position & INDEX_MASK) + 3)
    with pytest.raises(DiskError, match="row 7 of table 0, is damaged"):
        for i in range(40):
            store.write(np.arange(8, 40), random_rows(0, 32, i))
    store._let_go()


# A full disk


class Small(Quick):
    """A disk with room for some bytes. The write that does not fit is half done."""

    room = 1 << 60

    def write(self, file, data, offset):
        view = memoryview(data).cast("B")
        if len(view) > self.room:
            super().write(file, view[: self.room], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(view)
        super().write(file, data, offset)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    """Wherever it fills up: all rows are still held, the last point is the last, and work goes on once there is room."""
    make_small(monkeypatch)
    full = 0
    for room in [0, 1, *range(20, 4500, 197)]:
        files, path = Small(), tmp_path / str(room)
        store = filled(lambda layout, p=path, f=files: DiskStore(p, layout, files=f), n=20)
        store.flush()
        point, generation = contents(store), store.generation
        files.room = room
        model, unsure = dict(point), {}
        for i in range(6):
            keys, rows = table_keys(0, np.arange(20) * 97), random_rows(0, 20, i)
            new = {k: row.tobytes() for k, row in zip(keys.tolist(), rows, strict=True)}
            try:
                store.write(keys, rows)
                model |= new
                store.flush()
                point, generation = dict(model), store.generation
            except DiskFull as error:
                assert error.errno == errno.ENOSPC
                assert "the disk is full; " in str(error) and "the rows in it are intact" in str(error)
                full += 1
                unsure = new
                break
        found = contents(store)
        assert found.keys() == model.keys()
        assert all(row in (model[k], unsure.get(k)) for k, row in found.items())
        store._let_go()
        files.room = 1 << 60
        with DiskStore(path, LAYOUT, files=files) as store:
            assert store.generation >= generation
            if store.generation == generation:
                assert contents(store) == point
            check(store)
        if not unsure:
            continue
        store = DiskStore(path, LAYOUT, files=files)
        model = contents(store)
        files.room = 30
        with pytest.raises(DiskFull):
            store.write(np.array(list(unsure)), np.frombuffer(b"".join(unsure.values()), np.float32).reshape(-1, 4))
        files.room = 1 << 60
        store.write(np.array(list(unsure)), np.frombuffer(b"".join(unsure.values()), np.float32).reshape(-1, 4))
        assert contents(store) == model | unsure
        held, again = held_then_reopened(store)
        assert contents(again) == held
        again.close()
    assert full > 10


def test_more_files_than_allowed_raise_the_limit(tmp_path, monkeypatch):
    import resource

    limits, opened = [], os.open

    def few(path, flags, mode=0o777):
        if not limits:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, flags, mode)

    monkeypatch.setattr(resource, "setrlimit", lambda which, limit: limits.append(limit))
    monkeypatch.setattr(files_module.os, "open", few)
    file = OsFiles().create(tmp_path / "a")
    os.close(file)
    assert limits == [(resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2]


# Disk space


def test_bytes_on_disk_stay_below_one_and_a_half_payloads(tmp_path, monkeypatch):
    """At every call, whatever is overwritten, and with durable points in between."""
    monkeypatch.setattr(log, "SLACK", 1 << 18)
    rows, batch, width, rng = 60_000, 2000, 16, np.random.default_rng(0)
    store = DiskStore(tmp_path / "store", {0: Record(width)}, files=Quick())
    most = 0.0
    for i in range(200):
        first = min(i * batch, rows - batch)
        keys = np.arange(first, first + batch) if i < rows // batch else rng.choice(rows, batch, replace=False)
        store.write(keys, np.full((batch, width), i, np.float32))
        used = sum(p.stat().st_size for p in store.path.iterdir() if p.suffix in (".rows", ".keys"))
        most = max(most, (used - log.SLACK) / (len(store) * width * 4))
        if i % 50 == 49:
            store.flush()
    assert 1.2 < most <= 1.5
    assert len(store) == rows
    check(store)
    store.close()


# Threads and interrupts


def test_rows_are_read_while_they_are_moved(tmp_path, monkeypatch):
    """One thread reads rows that never change, while another's writes make the store move them."""
    make_small(monkeypatch)
    store, done, errors = DiskStore(tmp_path, {0: Record(8)}, files=Quick()), threading.Event(), []
    still, busy = np.arange(0, 3000, 3), np.setdiff1d(np.arange(3000), np.arange(0, 3000, 3))
    order = np.random.default_rng(0).permutation(3000)
    store.write(order, np.repeat(order[:, None], 8, 1).astype(np.float32))
    moved = store._logs[0].index.locate(still)
    reads = 0

    def read() -> None:
        nonlocal reads
        try:
            while not done.is_set():
                out = np.full((still.size, 8), -1, np.float32)
                assert store.read(still, out).all() and (out == still[:, None]).all()
                listed = np.concatenate(list(store.held()))
                assert np.isin(still, listed).all()
                reads += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    i = 0
    while i < 60 or (reads <= 3 and i < 5000 and not errors):  # the other thread may have to wait long for a core
        store.write(busy, np.full((busy.size, 8), i, np.float32))
        if i % 20 == 0:
            store.flush()
        i += 1
    done.set()
    thread.join(60)
    assert not thread.is_alive() and not errors, errors
    assert reads > 3 and (store._logs[0].index.locate(still) != moved).mean() > 0.5
    store.close()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX signals")
@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="plain Python kernels can be interrupted")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that hits a destructor is printed
@pytest.mark.parametrize("by", ["Ctrl-C", "another signal"])
def test_interrupts_at_random_moments(by, tmp_path, monkeypatch):
    """Whatever line a Ctrl-C hits, a write is whole or never happened, here and after reopening.

    SIGINT is held back while opening or closing, but not an exception from another signal's handler.
    """
    make_small(monkeypatch)
    store, n = DiskStore(tmp_path, {0: Record(8)}), 100
    store.write(np.arange(n), np.full((n, 8), -1, np.float32))  # import and compile first what a first call would
    store.flush()

    def write(call: int) -> None:
        store.write(np.arange(n) + call % 20 * n, np.full((n, 8), call, np.float32))
        if call % 5 == 0:
            store.flush()

    held_back = {
        "Ctrl-C": lambda *args: signal.raise_signal(signal.SIGINT),
        "another signal": signal.default_int_handler,
    }
    conformance.interrupted(write, 40, (50e-6, 3e-3), held_back[by])
    before = None
    for again in (False, True):
        if again:
            store.close()
            store = DiskStore(tmp_path, store.layout)
        check(store)
        held = [store.read(np.arange(20 * n), out := np.full((20 * n, 8), -1, np.float32)).tolist(), out.tolist()]
        assert before in (None, held)
        before = held
        for i in range(20):
            out = np.full((n, 8), -1, np.float32)
            found = store.read(np.arange(n) + i * n, out)
            assert found.all() == found.any() and (out == out[0, 0]).all()
    store.close()


@pytest.mark.parametrize("key", [-1, 1 << 48])
def test_a_key_of_another_table_under_right_checksums_is_refused(tmp_path, key):
    layout = {0: Record(2), 1: Record(3)}
    with DiskStore(tmp_path / "s", layout) as store:
        store.write(np.arange(4), np.ones((4, 2), np.float32))
    manifest = tmp_path / "s" / "store.json"
    body = json.loads(manifest.read_text())
    del body["~sha256"]
    [line] = body["facts"]["segments"]
    name, *middle, _ = line.split(" ")
    keys = np.array([0, 1, 2, key])
    path = tmp_path / "s" / f"{name}.keys"
    path.write_bytes(path.read_bytes()[:HEADER] + keys.tobytes())
    state = int(records.hash_keys(keys, np.uint64(0)))
    body["facts"]["segments"] = [" ".join([name, *middle, f"{state:016x}"])]
    manifest.write_bytes(seal(body))
    with pytest.raises(DiskError, match="is damaged, or row"):
        DiskStore(tmp_path / "s", layout)
