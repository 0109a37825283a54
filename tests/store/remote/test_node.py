"""Rows on memory nodes keep all promises of a store, on one node and divided between two; and what can go wrong: a node
that is killed, stopped, replaced or late, calls that come twice or are too large, another layout."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from skirl.core.placement import Placement, Shard
from skirl.store import DiskError, DiskStore, Layout, MemoryStore, Record, Store, open_store
from skirl.store.base import Facts, FrozenPart, SavedRows
from skirl.store.remote import rpc
from skirl.store.remote.meeting import NodeError
from tests.store import frozen
from tests.store.conformance import LAYOUT, StoreConformance, contents, filled
from tests.store.remote.nodes import Nodes, Patch, free_ports, in_process, leave, served
from tests.warm import COMMAND, PIPE, Python


@pytest.fixture(scope="module")
def nodes():
    with served(2) as found:
        yield found


def filled_on(nodes: Nodes) -> Store:
    return filled(lambda layout: open_store(nodes.spec, layout))


def one_row(store: Store) -> np.ndarray:
    out = np.zeros((1, 4), np.float32)
    assert store.read(np.array([97]), out).all()
    return out


def test_a_killed_node_is_named_and_rows_come_back_from_the_frozen_state(nodes: Nodes, tmp_path: Path):
    store = filled_on(nodes)
    held = contents(store)
    frozen.save(store, tmp_path)
    os.kill(nodes.pids()[1], signal.SIGKILL)
    with pytest.raises(NodeError, match=r"the node at .* is gone: start it again"):
        while True:
            contents(store)
    with pytest.raises(NodeError, match=rf"node at {nodes.addresses[1]} is gone"):
        store.write(np.arange(20), np.zeros((20, 4), np.float32))
    store.close()
    again = open_store(nodes.spec, LAYOUT)
    assert len(again) == 0, "a part begins empty"
    frozen.load(again, tmp_path)
    assert contents(again) == held


def stop(pid: int) -> None:
    """Stop a process, and wait: one of its threads may still answer until the signal arrives."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    until = time.monotonic() + 100
    while threads.exists() and time.monotonic() < until:
        states = {(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads.iterdir()}
        if states == {"T"}:
            return
        time.sleep(0.01)


def test_a_stopped_node_is_named_after_the_time_limit_and_another_process_takes_its_place(nodes: Nodes, monkeypatch):
    store = filled_on(nodes)
    stop(nodes.pids()[0])
    with monkeypatch.context() as patch, pytest.raises(NodeError, match=r"has not answered within 1 s"):
        patch.setattr(store.stores[0]._node, "timeout", 1.0)  # other calls are answered, late on a busy machine
        len(store)
    assert one_row(filled_on(nodes)).shape == (1, 4)


def test_no_node_at_all(monkeypatch):
    leave()
    monkeypatch.setenv("SKIRL_TIMEOUT", "0.2")
    with pytest.raises(NodeError, match=r"nobody answers at 127.0.0.1:9 after .* start `skirl serve "):
        open_store("rpc://127.0.0.1:9", LAYOUT)


def test_a_node_calls_no_function_that_is_not_the_stores(nodes: Nodes):
    store = filled_on(nodes)
    node = store.stores[0]._node
    with pytest.raises(rpc.Failed, match="AttributeError: On WorkerInfo"):
        rpc.end(rpc.begin(node.name, os._exit, (3,), 5.0))
    with pytest.raises(NodeError, match="serves no 'drain'"):
        node.call("drain")
    assert one_row(store).shape == (1, 4), "it lives"
    store.close()


def test_a_second_owner_of_a_part_is_refused_while_the_first_one_lives(nodes: Nodes):
    store = filled_on(nodes)
    out = in_process(nodes, "opened", "/rank-0")
    assert "the rows of trainer 0 at" in out and f"belong to run {store.stores[0]._node.run}, which is alive" in out
    assert in_process(nodes, "opened", "/rank-1") == "0 rows"
    assert one_row(store).shape == (1, 4)
    with pytest.raises(ValueError, match=r"this process has rows of trainer 0 at .* let each process be one trainer"):
        open_store(f"rpc://{nodes.addresses[0]}/rank-1", LAYOUT)
    store.close()


def test_an_owner_that_was_killed_is_followed_by_the_next(nodes: Nodes):
    for _ in range(2):
        assert in_process(nodes, "killed", "/rank-2") == "killed"


@pytest.mark.parametrize("kind", [pytest.param("memory", marks=pytest.mark.slow), "disk"])
def test_rows_go_from_nodes_to_other_stores_and_back(nodes: Nodes, tmp_path: Path, kind: str):
    rows = tmp_path / "rows"
    rows.mkdir()
    saved, here, model = Placement.even(2), Placement.even(3), dict[int, bytes]()
    facts: list[Facts] = []
    leave()
    with served(2, rows=f"disk:{tmp_path / 'nodes'}{{}}") if kind == "disk" else served(3) as there:
        whole = filled(MemoryStore)
        for site in range(2):
            store = open_store(there.spec, LAYOUT)
            store.describe({})  # as an engine does
            for keys in whole.held():
                own = keys[saved.site_of(keys) == site]
                record = LAYOUT.records[int(keys[0] >> 48)]
                out = np.zeros((own.size, record.width), record.dtype)
                whole.read(own, out)
                store.write(own, out)
            since = frozen_in(rows, store, None)
            own = np.array([0, 97])[saved.site_of(np.array([0, 97])) == site]
            store.write(own, np.ones((own.size, 4), np.float32))
            facts.append(frozen_in(rows, store, since))
            model |= contents(store)
            store.close()
        found: dict[int, bytes] = {}
        for site in range(3):
            taken = [FrozenPart(of, Shard.at(here, site)) for of in facts]
            own = open_store(there.spec, LAYOUT)
            own.thaw(SavedRows(rows, taken, "ab" * 16, 70))
            local = MemoryStore(LAYOUT) if kind == "memory" else DiskStore(tmp_path / f"local {site}", LAYOUT)
            local.thaw(SavedRows(rows, taken, "ab" * 16, 70))
            assert contents(own) == contents(local) and own.generation == 70 and own.identity == "ab" * 16
            found |= contents(own)
            own.close()
            local.close()
        assert found == model


def frozen_in(folder: Path, store: Store, since: Facts | None) -> Facts:
    state = store.freeze(folder, since)
    try:
        return state.write()
    finally:
        state.release()


def test_rows_on_disk_outlive_their_owner_and_other_records_are_refused(tmp_path: Path):
    with served(1, rows=f"disk:{tmp_path / 'rows'}") as nodes:
        store = filled_on(nodes)
        held, point = contents(store), (store.identity, store.generation)
        store.close()
        leave()
        again = open_store(nodes.spec, LAYOUT, rows=dict.fromkeys(LAYOUT.records, 1 << 20))
        assert contents(again) == held and again.identity == point[0] and again.generation > point[1]
        again.close()
        with pytest.raises(DiskError, match=r"has records .* open it with the tables"):
            open_store(nodes.spec, Layout({0: Record(7)}))
        for width in (7, 7, 3):  # other columns of a table
            open_store(f"{nodes.spec}/rank-0-0000000{width}", Layout({0: Record(width)})).close()


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
    all_or_nothing = False

    def make(self, layout: Layout) -> Store:
        return open_store(self.nodes.spec, layout)


TRAIN = "train --data synthetic:tiny --model dlrm-tiny --dim 4 --batch 32 --cache 200 --threads 1 --quiet --json"


def train(python: Python, folder: Path, *more: str) -> dict[str, object]:
    """Return what a training run reports about its model."""
    done = python.run(COMMAND, *TRAIN.split(), "--save", str(folder), *more)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {name: found[name] for name in ("loss", "auc", "logloss", "ne", "calibration")}


def test_a_trainer_on_a_node_has_the_bits_of_a_local_store_also_when_it_goes_on(python: Python, tmp_path: Path):
    [port] = free_ports(1)
    store = "--store", f"rpc://127.0.0.1:{port}"
    with python.start(COMMAND, "serve", f"127.0.0.1:{port}", stdout=PIPE, stderr=PIPE) as node:
        try:
            local = train(python, tmp_path / "local", "--steps", "12")
            train(python, tmp_path / "remote", *store, "--steps", "6")
            assert train(python, tmp_path / "remote", *store, "--steps", "12", "--resume") == local
        finally:
            node.send_signal(signal.SIGTERM)
            out, err = node.communicate(60)
    assert node.returncode == 0 and "SIGTERM" in out, err
    assert f"127.0.0.1:{port} keeps rows in memory, only this machine reaches it" in err
