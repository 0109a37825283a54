"""Rows on memory nodes keep all promises of a store, through two nodes in memory."""

import pytest

from skirl.store import Layout, Store, open_store
from tests.store.conformance import StoreConformance
from tests.store.remote.nodes import Nodes, Patch, served


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
