"""Rows over several stores: a store like any other, whatever the stores and their weights."""

import re
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skirl.store import DiskStore, Layout, MemoryStore, Record, open_store, own_part
from skirl.store.sharded import ShardedStore
from tests.store import frozen
from tests.store.conformance import LAYOUT, TABLES, StoreConformance, contents, random_rows, table_keys

Weights = Sequence[int]
ABOUT = {f"t{n}": "zeros()" for n in range(7)}


def in_memory(layout: Layout, weights: Weights = (3, 1, 2)) -> ShardedStore:
    return ShardedStore([MemoryStore(layout) for _ in weights], weights, layout)


def on_disks(root: Path, weights: Weights = (3, 1, 2)) -> ShardedStore:
    return ShardedStore([DiskStore(root / f"s{n}", LAYOUT) for n in range(len(weights))], weights, LAYOUT)


def divided(store: Any) -> bool:
    """Return whether each row is where its key's hash says."""
    each = enumerate(store.stores)
    return all((store.placement.site_of(keys) == site).all() for site, of in each for keys in of.held())


class TestShardedStore(StoreConformance):
    all_or_nothing = False

    def make(self, layout: Layout) -> ShardedStore:
        return in_memory(layout)


def test_stores_on_disk_know_their_list_and_refuse_rows_that_they_took_in_part(tmp_path):
    weights, other = (3, 1, 2), (1, 2, 3)
    with on_disks(tmp_path / "a", weights) as store:
        store.describe(ABOUT)
        store.write(table_keys(1, range(300)), random_rows(1, 300, 1))
        held = contents(store)
        facts = frozen.save(store, tmp_path / "saved")
    with on_disks(tmp_path / "b", weights) as store:
        store.write(table_keys(1, range(500)), random_rows(1, 500, 2))
        last = sorted((tmp_path / "saved").glob("*.rows"))[-1]  # of one store: the others' files are whole
        data = last.read_bytes()
        last.unlink()  # the store that wrote it has the same file
        last.write_bytes(data[:-8] + bytes(8))
        with pytest.raises(ValueError, match=last.name):
            frozen.thaw(store, tmp_path / "saved", facts)
        with pytest.raises(ValueError, match="does not have the rows"):
            store.read(table_keys(1, [0]), random_rows(1, 1, 0).copy())
        last.write_bytes(data)
        frozen.load(store, tmp_path / "saved")
        assert contents(store) == held
    with on_disks(tmp_path / "a", weights) as store:
        assert contents(store) == held and store.about == ABOUT
    with on_disks(tmp_path / "a", other) as store:
        with pytest.raises(ValueError, match=r"disk:.*s0 does not have the rows that this list"):
            store.read(table_keys(1, [0]), random_rows(1, 1, 0).copy())
        frozen.load(store, tmp_path / "saved")
        assert contents(store) == held
    with on_disks(tmp_path / "a", other) as store:
        assert contents(store) == held
    with on_disks(tmp_path / "a", weights) as store, pytest.raises(ValueError, match="this list of stores"):
        store.write(table_keys(1, [0]), random_rows(1, 1, 0))


KINDS = (("memory", "disk", "memory"), ("disk", "memory", "disk"))


def of_kinds(root: Path, kinds=KINDS[0], weights: Weights = (3, 1, 2)) -> ShardedStore:
    stores = [
        MemoryStore(LAYOUT) if kind == "memory" else DiskStore(root / str(n), LAYOUT) for n, kind in enumerate(kinds)
    ]
    return ShardedStore(stores, weights, LAYOUT)


@pytest.mark.parametrize(("make", "lost"), [(on_disks, "disk:.*s2"), (of_kinds, "memory")])
def test_a_store_that_lost_its_rows_is_refused_and_gets_them_from_a_checkpoint(make, lost, tmp_path):
    """As if a disk is not mounted, a folder in the list has changed its name, or some rows were in memory."""
    with make(tmp_path / "a") as store:
        store.describe(ABOUT)
        store.write(table_keys(1, range(90)), random_rows(1, 90, 1))
        held = contents(store)
        frozen.save(store, tmp_path / "saved")
    shutil.rmtree(tmp_path / "a" / "s2", ignore_errors=True)
    with make(tmp_path / "a") as store:
        assert store.about == ABOUT, "as the stores say that have rows"
        with pytest.raises(ValueError, match=rf"{lost} does not have the rows"):
            store.read(table_keys(1, [0]), random_rows(1, 1, 0).copy())
        with pytest.raises(ValueError, match="does not have the rows"):
            store.freeze(tmp_path / "torn", None)
        frozen.load(store, tmp_path / "saved")
        assert contents(store) == held
    if make is on_disks:
        with on_disks(tmp_path / "a") as store:
            assert contents(store) == held and store.about == ABOUT


class Fails(DiskStore):
    def thaw(self, saved) -> None:
        raise OSError("the disk is gone")


def test_rows_of_a_load_that_failed_halfway_are_refused(tmp_path):
    """By the new list and by the old one, because no store is sure to have its old rows."""
    folder, now = tmp_path, (1, 2, 3)
    with on_disks(folder / "a") as store:
        store.write(table_keys(1, range(90)), random_rows(1, 90, 1))
        held = contents(store)
        frozen.save(store, folder / "saved")
    with on_disks(folder / "b") as store:
        store.describe(ABOUT)
        store.write(table_keys(1, range(60)), random_rows(1, 60, 2))
    stores = [kind(folder / "b" / f"s{n}", LAYOUT) for n, kind in enumerate((DiskStore, Fails, DiskStore))]
    with ShardedStore(stores, now, LAYOUT) as store:
        with pytest.raises(OSError, match="the disk is gone"):
            frozen.load(store, folder / "saved")
        with pytest.raises(ValueError, match="does not have the rows that this list"):
            store.read(table_keys(1, [0]), random_rows(1, 1, 0).copy())
    for again in ((3, 1, 2), now):
        with on_disks(folder / "b", again) as store, pytest.raises(ValueError, match=r"s0 does not have the rows"):
            store.write(table_keys(1, [0]), random_rows(1, 1, 0))
    with on_disks(folder / "b", now) as store:
        frozen.load(store, folder / "saved")
        assert contents(store) == held
    with on_disks(folder / "b", now) as store:
        assert contents(store) == held


def test_rows_of_stores_of_all_kinds_are_taken_by_any(tmp_path):
    with of_kinds(tmp_path / "a") as store:
        for table in TABLES:
            store.write(table_keys(table, range(90)), random_rows(table, 90, table))
        store.write(table_keys(0, range(9)), random_rows(0, 9, 7))
        held = contents(store)
        facts = frozen.save(store, tmp_path / "saved" / "rows")
        assert [path.name for path in (tmp_path / "saved").iterdir()] == ["rows"], "nothing else is left behind"
        store.write(table_keys(0, range(40)), random_rows(0, 40, 8))
        frozen.load(store, tmp_path / "saved" / "rows")
        assert contents(store) == held
        again = frozen.save(store, tmp_path / "saved" / "rows", since=facts)
        assert set(again["segments"]) & set(facts["segments"]), "what is on disk is not written again"
        frozen.load(store, tmp_path / "saved" / "rows")
        assert contents(store) == held
    for name, kinds, weights in (("b", KINDS[0], (3, 1, 2)), ("c", KINDS[1], (3, 1, 2)), ("d", KINDS[1], (1, 1, 1))):
        with of_kinds(tmp_path / name, kinds, weights) as store:
            keys, rows = table_keys(0, [3, 97]), random_rows(0, 2, 3)
            frozen.load(store, tmp_path / "saved" / "rows", [(keys, rows)])
            over = {key: row.tobytes() for key, row in zip(keys.tolist(), rows, strict=True)}
            assert contents(store) == held | over and divided(store)
    with DiskStore(tmp_path / "one", LAYOUT) as one:
        frozen.load(one, tmp_path / "saved" / "rows")
        assert contents(one) == held
        frozen.save(one, tmp_path / "of one")
    frozen.load(several := in_memory(LAYOUT), tmp_path / "of one")
    assert contents(several) == held and divided(several)


def test_calls_of_stores_run_at_the_same_time():
    """Each store waits for the two others."""
    meet = threading.Barrier(3, timeout=60)

    class Meets(MemoryStore):
        def _read(self, kind, keys, out, found) -> None:
            meet.wait()
            super()._read(kind, keys, out, found)

    layout = Layout({0: Record(1)})
    store = ShardedStore([Meets(layout) for _ in range(3)], (1, 1, 1), layout)
    store.write(np.arange(90), np.zeros((90, 1), np.float32))
    assert store.read(np.arange(90), np.ones((90, 1), np.float32)).all()


def test_a_list_opens_the_stores(tmp_path):
    layout, (a, b) = Layout({0: Record(5)}), (f"disk:{tmp_path}/{name}" for name in "ab")
    with open_store(f"{a},{b}*3,memory", layout) as store:
        assert isinstance(store, ShardedStore) and store.placement.weights == (1, 3, 1)
        store.write(np.arange(60), np.zeros((60, 5), np.float32))
    with open_store(b, layout) as store:
        assert len(store) > 25
    with open_store(f"{a},{b}", layout) as store, pytest.raises(ValueError, match="does not have the rows"):
        store.read(np.arange(60), np.zeros((60, 5), np.float32))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("disk:a,checkpoint", "a list in which 'checkpoint' is no store"),
        ("disk:a,disk:a*2", "which has disk:a twice: name it once, with a weight"),
    ],
)
def test_a_list_that_is_none_is_refused_before_any_store_is_opened(spec, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(text)):
        open_store(spec, Layout({0: Record(5)}))
    assert not list(tmp_path.iterdir())


def test_a_trainer_has_a_part_of_its_own(tmp_path):
    rows, other = f"disk:{tmp_path}/rows", f"disk:{tmp_path}/other"
    assert own_part(rows, 0, among_others=False) == rows, "no trainer had the first one's"
    assert own_part(f"{rows},{other}*2", 1, among_others=True) == f"{rows}/rank-1,{other}/rank-1*2"
    (tmp_path / "rows" / "rank-0").mkdir(parents=True)
    assert own_part(rows, 0, among_others=False) == f"{rows}/rank-0"
    assert own_part(rows, 2, among_others=True) == f"{rows}/rank-2"
    assert own_part("memory", 2, among_others=True) == "memory"
