"""Rows on memory nodes keep all promises of a store, through two nodes in memory, and through nodes at two addresses."""

from pathlib import Path

import pytest

from skirl.store import Layout, Store, open_store
from tests.store import frozen
from tests.store.conformance import LAYOUT, StoreConformance, contents, filled
from tests.store.remote.nodes import Nodes, Patch, leave, served


@pytest.fixture(scope="module")
def nodes():
    with served(2) as found:
        yield found


class TestOnNodes(StoreConformance):
    syncs = ("fsync",)

    @pytest.fixture(autouse=True)
    def on(self, nodes: Nodes):
        self.nodes = nodes

    @pytest.fixture
    def monkeypatch(self):
        return Patch()

    def make(self, layout: Layout) -> Store:
        return open_store(self.nodes.spec, layout)


def test_nodes_that_meet_at_two_addresses(nodes: Nodes, tmp_path: Path):
    more = Nodes(1)
    try:
        spec = f"{nodes.spec},{more.spec}*2"
        store = filled(lambda layout: open_store(spec, layout))
        held = contents(store)
        assert sum(len(part.served) for part in more.nodes) == 1
        frozen.save(store, tmp_path)
        store.close()
        one = open_store(more.spec, LAYOUT)
        frozen.load(one, tmp_path)
        assert contents(one) == held
        one.close()
        again = open_store(spec, LAYOUT)
        frozen.load(again, tmp_path)
        assert contents(again) == held
        again.close()
    finally:
        leave()
        more.stop()
