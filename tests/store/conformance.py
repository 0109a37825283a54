"""The tests that every store has to pass: subclass `StoreConformance` in its test module and say how to make one."""

import gc
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from skirl.store import Layout, Record, Store
from skirl.store.base import Facts, Frozen
from skirl.tools.sealed_json import CheckpointError
from tests.cases import cases
from tests.store import frozen

LAYOUT = Layout({0: Record(4), 1: Record(9), 2: Record(4), 5: Record(3, "float64"), 6: Record(3)})
TABLES = sorted(LAYOUT.records)


def key(table: int, row: int) -> int:
    return table << 48 | row


def table_keys(table: int, rows) -> np.ndarray:
    return np.asarray(rows, np.int64) + key(table, 0)


def blank(table: int, n: int) -> np.ndarray:
    record = LAYOUT.records[table]
    return np.full((n, record.width), -7, record.dtype)


def random_rows(table: int, n: int, seed: int) -> np.ndarray:
    """Return rows of arbitrary bits: NaNs with payloads, infinities, denormals, minus zero."""
    record = LAYOUT.records[table]
    bits = np.random.default_rng(seed).bytes(n * record.nbytes)
    return np.frombuffer(bits, record.dtype).reshape(n, record.width)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def contents(store: Store) -> dict[int, bytes]:
    """Return every row by key, read as an export would."""
    held: dict[int, bytes] = {}
    for keys in store.held():
        assert keys.dtype == np.int64 and keys.size
        record = store.layout.records[int(keys[0] >> 48)]
        out = np.full((keys.size, record.width), -7, record.dtype)
        assert store.read(keys, out).all()
        for k, row in zip(keys.tolist(), out, strict=True):
            assert k not in held
            held[k] = row.tobytes()
    assert len(held) == len(store)
    return held


def filled(make: Callable[[Layout], Store], n: int = 50) -> Store:
    store = make(LAYOUT)
    for table in TABLES:
        store.write(table_keys(table, np.arange(n) * 97), random_rows(table, n, table))
    return store


def interrupted(call: Callable[[int], object], times: int, moments: tuple[float, float], by: Any) -> int:
    """Call `call(number)` until a signal has interrupted it `times` times at random moments. Return the number of calls."""
    rng, calls, interrupts = np.random.default_rng(0), 0, 0
    old, old_int = signal.signal(signal.SIGALRM, by), signal.getsignal(signal.SIGINT)
    try:
        while interrupts < times:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(*moments))
                call(calls)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupts += 1
            calls += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        signal.signal(signal.SIGINT, old_int)  # an exception in the middle of a hold leaves its handler installed
    return calls


class StoreConformance:
    syncs: tuple[str, ...] = ("fsync", "replace")
    """System calls without which nothing is frozen."""
    all_or_nothing = True
    """Whether rows are unchanged after a load that failed. Otherwise they are refused."""

    @pytest.fixture(autouse=True)
    def collected(self):
        """Close the files of stores that were dropped: hundreds may wait for the collector, which rarely runs in a fork."""
        yield
        gc.collect()
        gc.freeze()  # the next one need not look through what is left

    def make(self, layout: Layout) -> Store:
        """Return an empty store."""
        raise NotImplementedError

    # Reading and writing

    def test_widest_keys(self):
        keys = np.array([0, key(0, (1 << 48) - 1), key(2, 0), key(2, (1 << 48) - 1)])
        store = self.make(LAYOUT)
        store.write(keys, random_rows(0, 4, seed=0))
        out = blank(0, 4)
        assert store.read(keys, out).all() and same_bits(out, random_rows(0, 4, seed=0))

    def test_views_of_larger_arrays(self):
        store, rows = self.make(LAYOUT), random_rows(0, 10, seed=0)
        store.write(np.arange(20)[::2], rows)
        out = blank(0, 30)
        assert store.read(np.arange(20)[::2], out[10:20]).all()
        assert same_bits(out[10:20], rows) and (out[:10] == -7).all() and (out[20:] == -7).all()

    # Refusals

    def test_refuses(self):
        store, one, row = self.make(LAYOUT), np.array([0]), np.zeros((1, 4), np.float32)
        refused: list[tuple[Any, np.ndarray, str]] = [
            (one, np.zeros((1, 5), np.float32), r"rows are \[5\] float32, this store holds \[3\] float32, .*"),
            (one, np.zeros((1, 4), np.float64), r"rows are \[4\] float64"),
            (np.array([key(1, 0)]), row, r"table 1, which has records \[9\] float32, not \[4\]"),
            (np.array([key(3, 0)]), row, "table 3, which is not in the layout"),
            (np.array([key(7, 0)]), row, "table 7, which is not in the layout"),
            (np.array([-1]), row, "key -1 is of table -1, which is not in the layout"),
            (np.array([0, 1]), row, r"pass a contiguous array \[2, width\]"),
            (one, row[0], r"pass a contiguous array \[1, width\]"),
            (np.array([0, 1]), np.zeros((4, 2), np.float32).T, "pass a contiguous"),
            (np.array([0], np.int32), row, "pass an int64 array"),
            ([0], row, "keys are list"),
        ]
        for keys, rows, words in refused:
            for call in (store.read, store.write):
                with pytest.raises((TypeError, ValueError), match=words):
                    call(keys, rows)
        row.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            store.read(one, row)
        assert len(store) == 0

    def test_closed(self, tmp_path):
        store = filled(self.make)
        frozen.save(store, tmp_path)
        with store:
            pass
        store.close()
        calls: list[Callable[[], object]] = [
            lambda: store.read(np.array([0]), blank(0, 1)),
            lambda: store.write(np.array([0]), blank(0, 1)),
            lambda: list(store.held()),
            lambda: store.freeze(tmp_path, None),
            lambda: frozen.load(store, tmp_path),
            lambda: store.flush(),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="closed"):
                call()

    # Freezing and thawing

    def test_the_older_state_outlives_a_failed_one(self, tmp_path, monkeypatch):
        store = filled(self.make)
        held = contents(store)
        frozen.save(store, tmp_path)
        store.write(np.array([0]), blank(0, 1))
        files = sorted(tmp_path.rglob("*"))
        for name in self.syncs:
            with monkeypatch.context() as patch:
                patch.setattr(f"os.{name}", _fails)
                with pytest.raises(OSError, match="disk full"):
                    frozen.save(store, tmp_path)
            assert sorted(tmp_path.rglob("*")) == files
            other = self.make(LAYOUT)
            frozen.load(other, tmp_path)
            assert contents(other) == held
        store.write(table_keys(0, np.arange(5000)), random_rows(0, 5000, seed=1))  # while the store still grows
        assert store.read(np.arange(5000), out := blank(0, 5000)).all() and same_bits(out, random_rows(0, 5000, seed=1))

    def test_any_flipped_bit_is_refused(self, tmp_path):
        frozen.save(filled(self.make, n=20), tmp_path)
        store = filled(self.make)
        held = contents(store)
        rng, files = np.random.default_rng(0), sorted(path for path in tmp_path.rglob("*") if path.is_file())
        for path in files:
            data = path.read_bytes()
            for at in {0, len(data) - 1, *rng.integers(0, len(data), 200 // len(files)).tolist()}:
                flipped = bytearray(data)
                flipped[at] ^= 1 << int(rng.integers(8))
                path.write_bytes(flipped)
                with pytest.raises(CheckpointError, match=path.name):
                    frozen.load(store, tmp_path)
            path.write_bytes(data)
        if self.all_or_nothing:
            assert contents(store) == held and store.generation == 0
        frozen.load(store, tmp_path)
        assert len(store) == 20 * len(TABLES)

    def test_rows_in_another_format_are_refused(self, tmp_path):
        facts = frozen.save(filled(self.make), tmp_path)
        store = self.make(LAYOUT)
        with pytest.raises(CheckpointError, match="has rows in format 99"):
            frozen.thaw(store, tmp_path, facts | {"segment_format": 99})
        assert len(store) == 0

    def test_rows_of_other_tables_are_refused(self, tmp_path):
        frozen.save(filled(self.make), tmp_path)
        for records in ({0: Record(4)}, {**LAYOUT.records, 0: Record(5)}, {**LAYOUT.records, 0: Record(4, "float64")}):
            with pytest.raises(CheckpointError, match="same tables"):
                frozen.load(self.make(Layout(records)), tmp_path)

    # Threads

    def test_a_reader_and_a_writer_at_once(self, tmp_path):
        """Threads write new rows and read older ones back, each its own keys: every bit, through many growths.

        Meanwhile a frozen state is written.
        """
        store, rounds, n = self.make(LAYOUT), 40, 257
        store.write(table_keys(0, range(n)), random_rows(0, n, seed=77))
        held = contents(store)
        state = store.freeze(tmp_path, None)
        start, errors = threading.Barrier(4), []

        def work(table: int) -> None:
            try:
                rng = np.random.default_rng(table)
                start.wait()
                for i in range(rounds):
                    store.write(table_keys(table, np.arange(n) + i * n), random_rows(table, n, i))
                    j = int(rng.integers(i + 1))
                    out = blank(table, n + 1)
                    found = store.read(table_keys(table, np.arange(n + 1) + j * n), out)
                    assert found[:n].all()
                    assert same_bits(out[:n], random_rows(table, n, j))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(table,)) for table in (0, 1, 2, 5)]
        for thread in threads:
            thread.start()
        frozen.finish(state, tmp_path)
        for thread in threads:
            thread.join(timeout=120)
            assert not thread.is_alive(), "a deadlock"
        assert not errors, errors
        assert len(store) == len(contents(store)) == 4 * rounds * n
        other = self.make(LAYOUT)
        frozen.load(other, tmp_path)
        assert contents(other) == held

    # Everything, in any order

    def test_agrees_with_a_dict(self, tmp_path):
        make, counter = self.make, iter(range(1 << 30))

        def fresh_folder() -> Path:
            return tmp_path / str(next(counter))

        class Machine(AgainstDict):
            def __init__(self) -> None:
                super().__init__(make, fresh_folder())

        stateful.run_state_machine_as_test(Machine, settings=settings(cases(40), stateful_step_count=25))


def _fails(*args, **more):
    raise OSError("disk full")


ROWS = st.lists(st.integers(0, 60), max_size=20, unique=True)


class AgainstDict(RuleBasedStateMachine):
    """A store and a dict that get the same calls hold the same bits."""

    def __init__(self, make: Callable[[Layout], Store], folder: Path) -> None:
        super().__init__()
        self.make, self.folder = make, folder
        folder.mkdir()
        self.saved: tuple[str, int, dict[int, bytes]] | None = None
        self.since: Facts | None = None
        self.state: tuple[Frozen, dict[int, bytes]] | None = None

    @initialize()
    def begin(self) -> None:
        self.store = self.make(LAYOUT)
        self.model: dict[int, bytes] = {}

    @rule(table=st.sampled_from(TABLES), rows=ROWS, seed=st.integers(0, 9))
    def write(self, table: int, rows: list[int], seed: int) -> None:
        keys, values = table_keys(table, rows), random_rows(table, len(rows), seed)
        self.store.write(keys, values)
        self.model.update((k, row.tobytes()) for k, row in zip(keys.tolist(), values, strict=True))

    @rule(table=st.sampled_from(TABLES), rows=ROWS)
    def read(self, table: int, rows: list[int]) -> None:
        keys, out = table_keys(table, rows), blank(table, len(rows))
        untouched = blank(table, 1).tobytes()
        found = self.store.read(keys, out)
        assert found.tolist() == [k in self.model for k in keys.tolist()]
        for k, row in zip(keys.tolist(), out, strict=True):
            assert row.tobytes() == self.model.get(k, untouched)

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @precondition(lambda self: not self.state)
    @rule(everything=st.booleans())
    def freeze(self, everything: bool) -> None:
        generation = self.store.generation
        self.state = self.store.freeze(self.folder, None if everything else self.since), dict(self.model)
        assert self.store.generation > generation

    @precondition(lambda self: self.state)
    @rule(give_up=st.booleans())
    def finish(self, give_up: bool) -> None:
        assert self.state
        if give_up:
            self.state[0].release()
        else:
            self.since = frozen.finish(self.state[0], self.folder)
            self.saved = self.store.identity, self.since["generation"], self.state[1]
        self.state = None

    @precondition(lambda self: self.saved and not self.state)
    @rule(anew=st.booleans(), table=st.sampled_from(TABLES), rows=ROWS)
    def thaw(self, anew: bool, table: int, rows: list[int]) -> None:
        assert self.saved
        if anew:
            self.store.close()
            self.store = self.make(LAYOUT)
            assert self.store.identity != self.saved[0]
        keys, values = table_keys(table, rows), random_rows(table, len(rows), seed=33)
        frozen.load(self.store, self.folder, [(keys, values)] if rows else [])
        identity, generation, content = self.saved
        self.model = dict(content)
        self.model.update((k, row.tobytes()) for k, row in zip(keys.tolist(), values, strict=True))
        assert (self.store.identity, self.store.generation) == (identity, generation)

    @rule()
    def compare(self) -> None:
        assert contents(self.store) == self.model

    @invariant()
    def length(self) -> None:
        assert len(self.store) == len(self.model)

    def teardown(self) -> None:
        assert contents(self.store) == self.model
        self.store.close()
