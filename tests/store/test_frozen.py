"""Rows saved by N stores and loaded by M stores: each takes its own, compared with a dict."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.checkpoint import whole
from skirl.core.placement import Placement
from skirl.store import CheckpointRows, DiskStore, MemoryStore, Store
from skirl.store.base import Facts, FrozenPart, Mine
from tests.cases import cases
from tests.store.conformance import LAYOUT, contents
from tests.store.crash import Unsynced


def made(kind: str, folder: Path) -> Store:
    return MemoryStore(LAYOUT) if kind == "memory" else DiskStore(folder, LAYOUT, files=Unsynced())


def drawn(rng: np.random.Generator, table: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw distinct keys, and their rows."""
    keys = np.unique(rng.integers(0, 400, n)) | (table << 48)
    return keys, rng.random((keys.size, LAYOUT.records[table].width), np.float32)


def put(model: dict[int, bytes], keys: np.ndarray, rows: np.ndarray) -> None:
    model.update((key, row.tobytes()) for key, row in zip(keys.tolist(), rows, strict=True))


def mine_of(here: Placement, site: int) -> Mine:
    return lambda keys: here.site_of(keys) == site


def parts_for(
    here: Placement, site: int, saved: Placement, facts: list[Facts], over: list[Any], share: bool
) -> list[FrozenPart]:
    """Return the saved parts that a store takes. share: whether it takes parts that are all its own without checking
    their keys."""
    return [
        FrozenPart(facts[of], over[of], None if share and saved.meets(of, here) == [site] else mine_of(here, site))
        for of in here.meets(site, saved)
    ]


@cases(25)
@given(
    st.integers(1, 4), st.integers(1, 4), st.sampled_from(["memory", "disk"]), st.booleans(), st.integers(0, 1 << 30)
)
def test_rows_of_n_stores_go_to_m(
    tmp_path_factory: pytest.TempPathFactory, n: int, m: int, kind: str, share: bool, seed: int
) -> None:
    root, rng = tmp_path_factory.mktemp("parts"), np.random.default_rng(seed)
    saved, here, model = Placement.even(n), Placement.even(m), dict[int, bytes]()
    stores = [made(kind, root / f"from {i}") for i in range(n)]
    facts: list[Facts] = [{} for _ in stores]
    (root / "rows").mkdir()
    (root / "again").mkdir()
    for twice in range(2):  # the second frozen states have several files
        for _ in range(3):
            keys, rows = drawn(rng, int(rng.integers(3)), 200)
            for i, store in enumerate(stores):
                own = saved.site_of(keys) == i
                store.write(keys[own], np.ascontiguousarray(rows[own]))
            put(model, keys, rows)
        for i, store in enumerate(stores):
            state = store.freeze(root / "rows", facts[i] if twice else None)
            facts[i] = state.write()
            state.release()
    over: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in stores]
    for table in range(3):
        keys, rows = drawn(rng, table, 30)
        put(model, keys, rows)
        for i in range(n):
            own = saved.site_of(keys) == i
            over[i].append((keys[own], rows[own]))
    found: dict[int, bytes] = {}
    for site in range(m):
        taken: dict[int, bytes] = {}
        for store in (made(kind, root / f"to {site}"), CheckpointRows(LAYOUT)):
            for part in facts:
                whole.check(root / "rows", part)
            store.thaw_parts(root / "rows", parts_for(here, site, saved, facts, over, share), "ab" * 16, 70)
            held = contents(store)
            assert (store.identity, store.generation) == ("ab" * 16, 70)
            assert set(here.site_of(np.array(list(held), np.int64)).tolist()) <= {site}
            if not store.read_only:
                found |= held
                taken = dict(held)
                keys, rows = drawn(rng, 1, 20)
                store.write(keys, rows)  # the store goes on
                put(held, keys, rows)
                state = store.freeze(root / "again", facts[0])
                again = made(kind, root / f"again {site}")
                again.thaw(root / "again", state.write(), [])
                state.release()
                assert contents(again) == held == contents(store)
                again.close()
            else:
                assert held == taken
            store.close()
    assert found == model
