"""Rows on memory nodes keep all promises of a store, on one node and divided between two."""

import pytest

from skirl.store import Layout, Store, open_store
from tests.store.conformance import StoreConformance
from tests.store.remote.nodes import Nodes, Patch, served


@pytest.fixture(scope="module")
def nodes():
    with served(2) as found:
        yield found


class TestOnNode(StoreConformance):
    syncs = ("fsync",)

    @pytest.fixture(autouse=True)
    def on(self, nodes: Nodes):
        self.nodes = nodes

    @pytest.fixture
    def monkeypatch(self):
        return Patch()

    def make(self, layout: Layout) -> Store:
        return open_store(f"rpc://{self.nodes.addresses[0]}", layout)


@pytest.mark.slow  # TestShardedStore has lists of stores, and test_node.py two nodes
class TestOnTwoNodes(TestOnNode):
    def make(self, layout: Layout) -> Store:
        return open_store(self.nodes.spec, layout)
