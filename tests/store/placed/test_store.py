"""Rows over several stores: a store like any other, whatever the sites and the cuts."""

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skirl.core.placement import Cut, PlacedTable, PlacementPlan, Site
from skirl.store import DiskStore, Layout, MemoryStore, Record, open_store
from skirl.store.base import at_once
from skirl.store.link import LinkStore
from skirl.store.placed.store import PlacedStore
from skirl.tools.units import Link
from tests.store import frozen
from tests.store.conformance import LAYOUT, TABLES, StoreConformance, contents, filled, random_rows, table_keys

CUTS = [
    Cut.weighted([1, 1, 1]), Cut.weighted([3, 0, 1]), Cut((0, 20, 1500), (2, 0, 1), "rows"), Cut((0,), (1,)),
    Cut.even([2, 1, 0]), Cut((0, 7), (0, 2), "rows"), Cut((0, 5 << 60), (1, 1)),
]  # fmt: skip


def plan_for(layout: Layout, cuts=CUTS, stores: Sequence[str] = ("memory",) * 3) -> PlacementPlan:
    tables = [
        PlacedTable(f"t{n}", 1 << 40, layout.records[n].width if n in layout.records else 1, cuts[n % len(cuts)])
        for n in range(max(layout.records) + 1)
    ]
    return PlacementPlan(tuple(Site(f"s{i}", store) for i, store in enumerate(stores)), tuple(tables))


def placed(layout: Layout, cuts=CUTS, make=MemoryStore) -> PlacedStore:
    return PlacedStore(plan_for(layout, cuts), [make(layout) for _ in range(3)], layout)


class TestPlacedStore(StoreConformance):
    def make(self, layout: Layout) -> PlacedStore:
        return placed(layout)


def on_disks(root, plan: PlacementPlan, layout: Layout = LAYOUT) -> PlacedStore:
    stores = [DiskStore(root / site.name, layout) for site in plan.sites]
    return PlacedStore(plan, stores, layout)


def test_every_row_is_where_the_plan_says_and_is_counted():
    store: Any = filled(placed)
    for site, inner in enumerate(store.stores):
        keys = np.concatenate([*inner.keys(), np.empty(0, np.int64)])
        assert (store.placement.site_of(keys) == site).all()
        assert store.counts[site].writes == len(keys) == len(inner)
    before = contents(store)
    assert [c.reads for c in store.counts] == [len(inner) for inner in store.stores]
    width = {table: LAYOUT.records[table].width * np.dtype(LAYOUT.records[table].dtype).itemsize for table in TABLES}
    moved = sum(width[key >> 48] for key in before)
    assert sum(c.bytes_read for c in store.counts) == sum(c.bytes_written for c in store.counts) == moved


@pytest.mark.parametrize("cuts", [CUTS[::-1], [Cut.even([0, 1, 2])]])
def test_frozen_rows_move_to_where_another_plan_has_them(tmp_path, cuts):
    rows_move(tmp_path, cuts)


def rows_move(folder: Path, cuts: list[Cut]) -> None:
    """Move rows out of one store into several, into others, and back into one."""
    plain = filled(MemoryStore)
    held = contents(plain)
    frozen.save(plain, folder / "0")
    for number, cut in enumerate([CUTS, cuts, cuts, None]):
        store = MemoryStore(LAYOUT) if cut is None else placed(LAYOUT, cut)
        frozen.load(store, folder / str(number), [(table_keys(0, [97]), random_rows(0, 1, 3 + number))])
        held[97] = random_rows(0, 1, 3 + number).tobytes()
        assert contents(store) == held
        if isinstance(store, PlacedStore):
            for site, inner in enumerate(store.stores):
                assert all((store.placement.site_of(keys) == site).all() for keys in inner.keys())  # noqa: SIM118
        frozen.save(store, folder / str(number + 1))


def test_sites_on_disk_take_all_or_nothing_and_know_their_placement(tmp_path):
    plan, other = plan_for(LAYOUT), plan_for(LAYOUT, CUTS[::-1])
    with on_disks(tmp_path / "a", plan) as store:
        store.remember({f"t{n}": "zeros()" for n in range(7)})
        store.write(table_keys(1, range(300)), random_rows(1, 300, 1))
        held = contents(store)
        facts = frozen.save(store, tmp_path / "saved")
        assert facts["nodes"]["placement"] == plan.placement.digest
    with on_disks(tmp_path / "b", plan) as store:
        store.write(table_keys(1, range(500)), random_rows(1, 500, 2))
        later = contents(store)
        last = sorted((tmp_path / "saved").glob("*.rows"))[-1]  # of one site: the others' files are whole
        data = last.read_bytes()
        last.unlink()  # the store that wrote it has the same file
        last.write_bytes(data[:-8] + bytes(8))
        with pytest.raises(ValueError, match=last.name):
            store.thaw(tmp_path / "saved", facts, [])
        assert contents(store) == later
        last.write_bytes(data)
        frozen.load(store, tmp_path / "saved")
        assert contents(store) == held
    with on_disks(tmp_path / "a", plan) as store:
        assert contents(store) == held and set(store.about) == {f"t{n}" for n in range(7)}
    with on_disks(tmp_path / "a", other) as store:
        with pytest.raises(ValueError, match=r"site 's0' .* has rows that another placement put there: load a"):
            store.read(table_keys(1, [0]), random_rows(1, 1, 0).copy())
        frozen.load(store, tmp_path / "saved")
        assert contents(store) == held
    with on_disks(tmp_path / "a", other) as store:
        assert contents(store) == held
    with on_disks(tmp_path / "a", plan) as store, pytest.raises(ValueError, match="another placement"):
        store.write(table_keys(1, [0]), random_rows(1, 1, 0))


def test_a_site_that_lost_its_rows_is_refused_and_gets_them_from_a_checkpoint(tmp_path):
    """As if a disk is not mounted, or a folder in the plan has changed its name."""
    lost_site(tmp_path, 2)


def lost_site(folder: Path, gone: int = 0) -> None:
    plan = plan_for(LAYOUT, [Cut.even([0, 1, 2])])
    about = {f"t{n}": "zeros()" for n in range(7)}
    with on_disks(folder / "a", plan) as store:
        store.remember(about)
        store.write(table_keys(1, range(90)), random_rows(1, 90, 1))
        held = contents(store)
        frozen.save(store, folder / "saved")
    shutil.rmtree(folder / "a" / f"s{gone}")
    with on_disks(folder / "a", plan) as store:
        assert store.about == about, "as the sites say that have rows"
        with pytest.raises(ValueError, match=rf"site 's{gone}' .* is empty and was never told of the rows at site"):
            store.read(table_keys(1, [0]), random_rows(1, 1, 0).copy())
        with pytest.raises(ValueError, match="is empty and was never told"):
            store.freeze(folder / "torn", None)
        frozen.load(store, folder / "saved")
        assert contents(store) == held
    with on_disks(folder / "a", plan) as store:
        assert contents(store) == held and store.about == about


class Takes(DiskStore):
    """Signals once it has its rows."""

    taken = threading.Semaphore(0)

    def thaw_parts(self, *args, **kwargs) -> None:
        super().thaw_parts(*args, **kwargs)
        self.taken.release()


class Fails(DiskStore):
    """Reads its rows until all are ready, and loses its disk once the two others have theirs."""

    def thaw_parts(self, folder, parts, identity, generation, ready=at_once) -> None:
        ready()
        assert all(Takes.taken.acquire(timeout=60) for _ in range(2))
        raise OSError("the disk is gone")


def test_rows_of_a_load_that_failed_halfway_are_refused(tmp_path):
    """Under the new plan and under the old one, because no site is sure to have its old rows."""
    half_loaded(tmp_path, CUTS[::-1])


def half_loaded(folder: Path, now: list[Cut] = CUTS) -> None:
    plan, other = plan_for(LAYOUT), plan_for(LAYOUT, now)
    with on_disks(folder / "a", plan) as store:
        store.write(table_keys(1, range(90)), random_rows(1, 90, 1))
        held = contents(store)
        frozen.save(store, folder / "saved")
    with on_disks(folder / "b", plan) as store:
        store.remember({f"t{n}": "zeros()" for n in range(7)})
        store.write(table_keys(1, range(60)), random_rows(1, 60, 2))
    kinds = (Takes, Fails, Takes)
    stores = [kind(folder / "b" / site.name, LAYOUT) for kind, site in zip(kinds, other.sites, strict=True)]
    with PlacedStore(other, stores, LAYOUT) as store:
        with pytest.raises(OSError, match="the disk is gone"):
            frozen.load(store, folder / "saved")
        with pytest.raises(ValueError, match="a load ended before all sites had their rows"):
            store.read(table_keys(1, [0]), random_rows(1, 1, 0).copy())
    for again in (plan, other):
        with (
            on_disks(folder / "b", again) as store,
            pytest.raises(ValueError, match=r"site 's0' .*: a load ended before"),
        ):
            store.write(table_keys(1, [0]), random_rows(1, 1, 0))
    with on_disks(folder / "b", other) as store:
        frozen.load(store, folder / "saved")
        assert contents(store) == held
    with on_disks(folder / "b", other) as store:
        assert contents(store) == held


KINDS = (("memory", "disk", "link"), ("disk", "memory", "disk"))


def of_kinds(root: Path, kinds=KINDS[0], cuts=CUTS) -> PlacedStore:
    """Return a store with sites in memory, on disk, and behind a link."""
    made = {
        "memory": lambda n: MemoryStore(LAYOUT),
        "link": lambda n: LinkStore(MemoryStore(LAYOUT), Link(rate=1e12, delay=0.0)),
        "disk": lambda n: DiskStore(root / str(n), LAYOUT),
    }
    stores = [made[kind](n) for n, kind in enumerate(kinds)]
    return PlacedStore(plan_for(LAYOUT, cuts), stores, LAYOUT)


def test_sites_of_mixed_kinds_are_frozen_as_on_disk_and_taken_by_any(tmp_path):
    with of_kinds(tmp_path / "a") as store:
        for table in TABLES:
            store.write(table_keys(table, range(90)), random_rows(table, 90, table))
        store.write(table_keys(0, range(9)), random_rows(0, 9, 7))
        held = contents(store)
        facts = frozen.save(store, tmp_path / "saved" / "rows")
        assert facts["kind"] == store.frozen_kind == "disk rows" and held
        assert {path.suffix for path in (tmp_path / "saved" / "rows").iterdir()} == {".rows", ".keys", ".json"}
        assert [path.name for path in (tmp_path / "saved").iterdir()] == ["rows"], "nothing else is left behind"
        store.write(table_keys(0, range(40)), random_rows(0, 40, 8))
        frozen.load(store, tmp_path / "saved" / "rows")
        assert contents(store) == held
        again = frozen.save(store, tmp_path / "saved" / "rows", since=facts)
        assert set(again["segments"]) & set(facts["segments"]), "what is on disk is not written again"
        frozen.load(store, tmp_path / "saved" / "rows")
        assert contents(store) == held
    for name, kinds, cuts in (("b", KINDS[0], CUTS), ("c", KINDS[1], CUTS), ("d", KINDS[1], CUTS[::-1])):
        with of_kinds(tmp_path / name, kinds, cuts) as store:
            over = [(table_keys(0, [3, 97]), random_rows(0, 2, 3))]
            frozen.load(store, tmp_path / "saved" / "rows", over)
            wanted = held | dict(
                zip(table_keys(0, [3, 97]).tolist(), (row.tobytes() for row in over[0][1]), strict=True)
            )
            assert contents(store) == wanted
            for site, inner in enumerate(store.stores):
                assert all((store.placement.site_of(keys) == site).all() for keys in inner.keys())  # noqa: SIM118
    with DiskStore(tmp_path / "one", LAYOUT) as one:
        frozen.load(one, tmp_path / "saved" / "rows")
        assert contents(one) == held
    with pytest.raises(ValueError, match="need not fit in memory"):
        frozen.load(MemoryStore(LAYOUT), tmp_path / "saved" / "rows")


def test_rows_on_disk_whose_neighbours_were_in_memory_are_not_trained_further(tmp_path):
    with of_kinds(tmp_path) as store:
        store.remember({f"t{n}": "zeros()" for n in range(7)})
        store.write(table_keys(0, range(90)), random_rows(0, 90, 1))
        held = contents(store)
        frozen.save(store, tmp_path / "saved" / "rows")
    with of_kinds(tmp_path) as store:
        with pytest.raises(ValueError, match="site 's1' on disk has the rows of a run whose site 's0' was in memory"):
            store.read(table_keys(0, [0]), random_rows(0, 1, 0).copy())
        frozen.load(store, tmp_path / "saved" / "rows")
        assert contents(store) == held


def test_calls_of_sites_run_at_the_same_time():
    """Each site waits for the two others."""
    meet = threading.Barrier(3, timeout=60)

    class Meets(MemoryStore):
        def _read(self, kind, keys, out, found) -> None:
            meet.wait()
            super()._read(kind, keys, out, found)

    layout = Layout({0: Record(1)})
    store = PlacedStore(plan_for(layout, [Cut.even([0, 1, 2])]), [Meets(layout) for _ in range(3)], layout)
    store.write(np.arange(90), np.zeros((90, 1), np.float32))
    assert store.read(np.arange(90), np.ones((90, 1), np.float32)).all()


def test_the_file_opens_the_stores(tmp_path):
    layout, sites = Layout({0: Record(5)}), tuple(f"disk:{tmp_path}/{n}" for n in range(3))
    plan_for(layout, stores=sites).save(tmp_path / "plan.json")
    spec = f"placed:{tmp_path}/plan.json"
    with open_store(spec, layout) as store:
        store.write(np.arange(60), np.zeros((60, 5), np.float32))
    with open_store(f"{spec}/rank-1", layout) as store:
        assert len(store) == 0
    assert sorted(p.name for p in (tmp_path / "0").iterdir() if p.is_dir()) == ["rank-1"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"layout": Layout({0: Record(5), 1: Record(5)})},
            "the plan has 1 tables, the model 2: make the plan for this model",
        ),
        ({"layout": Layout({0: Record(4)})}, "table 't0' has dim 5 in the plan, and records of 4 numbers in the model"),
        ({"rows": {0: 9}}, "table 't0' has 1,099,511,627,776 rows in the plan and 9 in the model"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(tmp_path, change, text):
    plan_for(Layout({0: Record(5)})).save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=text):
        open_store(
            f"placed:{tmp_path}/plan.json", change.get("layout", Layout({0: Record(5)})), rows=change.get("rows")
        )
