import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from skirl.store import Layout, MemoryStore, Record, open_store
from skirl.store import memory as memory_module
from skirl.store.arena import Arena
from tests.processes import measure
from tests.store import frozen
from tests.store.conformance import StoreConformance, contents, filled, interrupted


class TestMemoryStore(StoreConformance):
    def make(self, layout: Layout) -> MemoryStore:
        return MemoryStore(layout)


def test_an_array_grows_while_a_view_is_held():
    arena = Arena(np.int64)
    view, n = arena.array, len(arena)
    view[:] = 7
    arena.reserve(2 * n)
    assert (arena.array[:n] == 7).all() and not arena.array[n:].any() and (view == 7).all()


MEASURE = """
width, rows, batch = map(int, sys.argv[1:])
values = np.ones((batch, width), np.float32)
warm = MemoryStore({0: Record(width)})
for start in range(0, 3 * batch, batch):
    warm.write(np.arange(start, start + batch), values)
warm.read(np.arange(batch), values)
warm.close()
store = MemoryStore({0: Record(width)})
open("/proc/self/clear_refs", "w").write("5")  # forget the peak
before = status("VmRSS")
bound = 0
for start in range(0, rows, batch):
    store.write(882_800_000 - np.arange(start, start + batch), values)
    bound = max(bound, (status("VmRSS") - before) - (start + batch) * (4 * width + 20))
print(json.dumps({"peak": status("VmHWM") - before, "above_bound": bound, "rows": len(store)}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with Linux's /proc")
def test_memory_is_rows_and_20_bytes():
    """At the end, at every step, and at the peak while growing. The tables' sizes do not matter."""
    width, rows, batch, slack = 4, 2_000_000, 10_000, 8 << 20
    measured = measure(MEASURE, width, rows, batch)
    assert measured["rows"] == rows
    assert measured["above_bound"] < slack
    assert measured["peak"] < rows * (4 * width + 20) + slack
    assert measured["peak"] > rows * (4 * width + 8), "the measure itself: what is written has to show"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_write_to_the_parent():
    store = filled(MemoryStore)
    held = contents(store)
    pid = os.fork()
    if pid == 0:
        store.write(np.array([0]), np.ones((1, 4), np.float32))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert contents(store) == held


def test_a_read_passes_a_write_in_progress_and_growth_waits_for_it(monkeypatch):
    store, copying, go_on = MemoryStore({0: Record(8)}), threading.Event(), threading.Event()
    scatter = memory_module._scatter

    def slow_scatter(held, positions, rows):
        if rows[0, 0] == 2:
            copying.set()
            assert go_on.wait(30)
        scatter(held, positions, rows)

    monkeypatch.setattr(memory_module, "_scatter", slow_scatter)
    small, large = np.arange(10), np.arange(10, 100_000)
    store.write(small, np.full((10, 8), 1, np.float32))
    slow = threading.Thread(target=store.write, args=(small[:5], np.full((5, 8), 2, np.float32)), daemon=True)
    slow.start()
    assert copying.wait(30)
    out = np.zeros((5, 8), np.float32)
    assert store.read(small[5:], out).all() and (out == 1).all()
    grows = threading.Thread(target=store.write, args=(large, np.full((large.size, 8), 3, np.float32)), daemon=True)
    grows.start()
    grows.join(0.2)
    assert grows.is_alive() and len(store) == 10
    go_on.set()
    for thread in (slow, grows):
        thread.join(30)
        assert not thread.is_alive()
    out = np.zeros((100_000, 8), np.float32)
    assert store.read(np.arange(100_000), out).all()
    assert (out[:5] == 2).all() and (out[5:10] == 1).all() and (out[10:] == 3).all()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX signals")
@pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="compiled kernels cannot be interrupted, plain Python can"
)
def test_interrupts_at_random_moments(no_callbacks_of_gc):
    """Whatever line a Ctrl-C hits, a write is whole or never happened, and the store keeps working for other threads too."""
    store, n = MemoryStore({0: Record(8)}), 300
    with MemoryStore({0: Record(8)}) as other:  # import here what a first use would import
        other.write(np.arange(n), np.zeros((n, 8), np.float32))
        assert other.read(np.arange(n), np.zeros((n, 8), np.float32)).all()

    def write(call: int) -> None:
        store.write(np.arange(n) + call * n, np.full((n, 8), call, np.float32))

    calls = interrupted(write, 100, (10e-6, 300e-6), signal.default_int_handler)
    whole = 0
    for i in range(calls):
        out = np.full((n, 8), -1, np.float32)
        found = store.read(np.arange(n) + i * n, out)
        assert found.all() == found.any() and (out == (i if found[0] else -1)).all()
        whole += int(found[0])
    assert len(store) == whole * n >= (calls - 100) * n
    keys = np.arange(10**6)
    thread = threading.Thread(target=store.write, args=(keys, np.zeros((10**6, 8), np.float32)), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def no_callbacks_of_gc() -> Iterator[None]:
    """Remove Hypothesis's callback: nobody would catch an interrupt raised inside of it."""
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks


def test_unchanged_rows_are_in_the_files_before(tmp_path):
    """Until these take twice the bytes of the rows held: then all rows are written again."""
    store = MemoryStore({0: Record(2)})
    store.write(np.arange(100), np.ones((100, 2), np.float32))
    since = frozen.save(store, tmp_path)
    sizes = []
    for i in range(60):
        store.write(np.arange(10), np.full((10, 2), i, np.float32))
        since = frozen.save(store, tmp_path, since)
        sizes.append(int(since["segments"][-1].split(" ")[3]))
        assert len(since["segments"]) == len(set(since["segments"]))
    assert set(sizes) == {10, 100} and sizes[0] == 10 and sizes.count(100) > 1
    again = MemoryStore({0: Record(2)})
    frozen.load(again, tmp_path)
    rows = [np.zeros((100, 2), np.float32) for _ in range(2)]
    assert again.read(np.arange(100), rows[0]).all() and store.read(np.arange(100), rows[1]).all()
    assert len(again) == 100 and np.array_equal(*rows)
    frozen.save(store, tmp_path, since)
    assert frozen.facts_in(tmp_path)["segments"] == since["segments"], "nothing has changed: no file more"


def test_open_store():
    layout = Layout({0: Record(3)})
    store = open_store("memory", layout)
    assert isinstance(store, MemoryStore)
    assert open_store(store, {0: Record(3)}) is store
    with pytest.raises(ValueError, match="open it with the latter"):
        open_store(store, {0: Record(4)})
