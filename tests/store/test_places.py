import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.store import _places as places_module
from skirl.store._places import Places, _hash
from skirl.store._records import INDEX_BITS
from tests.cases import cases


def arrays(slots: int = 64) -> list[np.ndarray]:
    return [np.zeros(slots, np.int64), np.zeros(slots, np.int64), np.zeros(slots, np.uint64)]


def late(n: int) -> np.ndarray:
    """Keys whose hashes are all at the end of the table."""
    keys = np.arange(200 * n)
    hashes = np.array([int(_hash(int(k))) for k in keys], np.uint64)
    return keys[np.argsort(hashes)][-n:]


LATE = late(300)


@cases(100)
@given(st.lists(st.lists(st.integers(0, 400), max_size=40, unique=True), max_size=30), st.booleans())
def test_agrees_with_a_dict(calls, crowded):
    places, (ends, live, sums), model, first = Places(), arrays(), {}, [0, 0]
    for i, rows in enumerate(calls):
        keys = LATE[np.array(rows, np.int64) % 300] if crowded else np.array(rows, np.int64) * 7
        keys = np.unique(keys)
        places.reserve(keys.size)
        slot = i % 2
        places.place(keys, slot << INDEX_BITS | first[slot], ends, live, sums)
        model.update((int(k), slot << INDEX_BITS | first[slot] + j) for j, k in enumerate(keys))
        first[slot] += keys.size
    assert places.count == len(model)
    assert ends[:2].tolist() == first
    held = [position >> INDEX_BITS for position in model.values()]
    assert live[:2].tolist() == [held.count(0), held.count(1)]
    asked = np.concatenate([LATE, np.arange(3000)])
    assert places.locate(asked).tolist() == [model.get(int(k), -1) for k in asked]


@pytest.mark.parametrize("crowded", [True, False])
def test_growth_keeps_all_even_where_hashes_crowd(crowded, monkeypatch):
    monkeypatch.setattr(places_module, "_PAD", 32)
    monkeypatch.setattr(places_module, "_FIRST", 16)
    places, more = Places(), arrays()
    keys = LATE if crowded else np.arange(300) << 40
    for start in range(0, 300, 10):
        places.reserve(10)
        places.place(keys[start : start + 10], start, *more)
        assert places.locate(keys[: start + 10]).tolist() == list(range(start + 10))
        assert (places.locate(keys[start + 10 :]) == -1).all()


def test_standing_is_the_newest():
    places, more = Places(), arrays()
    places.reserve(5)
    places.place(np.array([1, 2, 3]), 0, *more)
    places.place(np.array([2, 4]), 3, *more)
    assert places.standing(np.array([1, 2, 3]), 0).tolist() == [0, 2]
    assert places.standing(np.array([2, 4]), 3).tolist() == [0, 1]
    assert more[1][0] == 4 and more[0][0] == 5


def test_more_than_fit_is_refused():
    with pytest.raises(ValueError, match="give some tables another dim"):
        Places()._grow(1 << 32)


MEASURE = """
import json, sys
import numpy as np
from skirl.store import DiskStore, Record

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

folder, width, rows, batch = sys.argv[1], *map(int, sys.argv[2:])
values = np.ones((batch, width), np.float32)
warm = DiskStore(folder + "/warm", {0: Record(width)})
for start in range(0, 12 * batch, batch):
    warm.write(np.arange(start, start + batch) % (9 * batch), values)
warm.read(np.arange(batch), values)
warm.close()
del warm
store = DiskStore(folder + "/store", {0: Record(width)})
open("/proc/self/clear_refs", "w").write("5")  # forget the peak
before = status("RssAnon")
above = 0
for start in range(0, rows, batch):
    store.write(882_800_000 - np.arange(start, start + batch), values)
    above = max(above, status("RssAnon") - before - 16 * (start + batch))
anon = status("RssAnon") - before
for start in range(0, rows // 2, batch):
    store.write(882_800_000 - 2 * np.arange(start, start + batch), values)  # cleans
peak = status("VmHWM") - status("RssFile") - before
store.close()
store = DiskStore(folder + "/store", {0: Record(width)})
print(json.dumps({"above_bound": above, "bytes_a_row": anon / rows, "again": (status("RssAnon") - before) / rows,
                  "rows": len(store), "peak_above": peak - 16 * rows}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with Linux's /proc")
def test_memory_is_16_bytes_a_row(tmp_path):
    """At every step on the way, while it cleans, and when opened again."""
    batch, rows, slack = 20_000, 2_000_000, 12 << 20
    script = [sys.executable, "-c", MEASURE, str(tmp_path), "4", str(rows), str(batch)]
    env = os.environ | {"NUMBA_DISABLE_JIT": "0"}
    measured = json.loads(subprocess.run(script, env=env, capture_output=True, text=True, check=True).stdout)
    print(measured)
    assert measured["rows"] == rows
    assert measured["above_bound"] < slack and measured["peak_above"] < 2 * slack
    assert measured["bytes_a_row"] > 12, "the measure itself: what is held has to show"
    assert measured["again"] < 16 + slack / rows
