"""The changes since the last checkpoint, compared with a dict of copies."""

import threading
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.store import changes as changes_module
from skirl.store.changes import Changes
from tests.cases import cases

WIDTH, MOST = 3, 40


@dataclass
class Landing:
    rows: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def landed(self) -> np.ndarray:
        return self.rows


class Elsewhere:
    """Records outside the host's memory, like those of a GPU."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows, self.shape, self.dtype, self.itemsize = rows, rows.shape, rows.dtype, rows.itemsize
        self.nbytes = rows.nbytes

    def copy(self, places: np.ndarray) -> Landing:
        return Landing(self.rows[places])


places = st.lists(st.integers(0, MOST - 1), min_size=1, max_size=8, unique=True)
calls = st.one_of(
    st.tuples(st.sampled_from(["change", "replace", "empty"]), places),
    st.tuples(st.just("grow"), st.integers(1, 5)),
    st.tuples(st.just("freeze"), st.booleans()),
    st.tuples(st.sampled_from(["take", "take", "take", "forget"]), st.none()),
)


@cases(200)
@given(calls=st.lists(calls, max_size=40), away=st.booleans(), seed=st.integers(0, 99))
def test_what_is_taken_is_what_was_frozen(calls, away, seed):
    rng = np.random.default_rng(seed)
    rows, flags, count = rng.random((MOST, WIDTH), np.float32), np.zeros(MOST, np.uint8), 10
    key_of = np.where(rng.random(MOST) < 0.8, np.arange(MOST), -1)
    fresh = iter(range(MOST, 10_000))
    changed: set[int] = set()
    owed: dict[int, bytes] = {}
    changes, records = Changes(), Elsewhere(rows) if away else rows

    def take() -> bool:
        taken = changes.take(flags, key_of[:count], records)
        assert (taken is None) == (not owed)
        if taken is None:
            return False
        assert len(taken[0])
        for key, row in zip(taken[0].tolist(), taken[1], strict=True):
            assert owed.pop(key) == row.tobytes()
        return True

    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("_PIECE", 3 * 4 * WIDTH), ("_PIECE_AWAY", 5 * 4 * WIDTH), ("_SCAN", 7)):
            patch.setattr(changes_module, name, size)
        for name, given in calls:
            if name in ("change", "replace", "empty"):
                some = np.array([place for place in given if place < count], np.int64)
                changes.changing(flags, some, key_of[:count], records)
                changed |= set(some.tolist())
                rows[some] = rng.random((len(some), WIDTH), np.float32)
                if name != "change":
                    key_of[some] = [next(fresh) if name == "replace" else -1 for _ in some]
            elif name == "grow":
                count = min(MOST, count + given)
            elif name == "take":
                take()
            elif name == "forget":
                changes.forget(flags)
                owed.clear()
            else:
                while take():
                    pass
                changes.freeze(flags, key_of[:count], everything=given)
                some = [p for p in range(count) if key_of[p] >= 0 and (given or p in changed)]
                owed, changed = {int(key_of[p]): rows[p].tobytes() for p in some}, set()
        while take():
            pass
        assert not owed


def test_who_changes_too_much_waits_for_the_writer(monkeypatch):
    monkeypatch.setattr(changes_module, "MOST_ASIDE", 100)
    rows, flags, key_of = np.ones((50, WIDTH), np.float32), np.zeros(50, np.uint8), np.arange(50)
    for by in ("take", "forget"):
        changes = Changes()
        changes.wait_for_room()
        changes.freeze(flags, key_of, everything=True)
        changes.changing(flags, key_of[:4], key_of, rows)
        changes.wait_for_room()  # 4 x (12 + 8) bytes are set aside: there is room
        changes.changing(flags, key_of[4:6], key_of, rows)
        thread = threading.Thread(target=changes.wait_for_room, daemon=True)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive() and changes._aside_bytes == 120
        changes.take(flags, key_of, rows) if by == "take" else changes.forget(flags)
        thread.join(30)
        assert not thread.is_alive()
