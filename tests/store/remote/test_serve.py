"""`skirl serve` as a user runs it: processes that meet, a trainer that trains with the bits of a local store, and an end."""

import json
import signal
from pathlib import Path

from tests.store.remote.nodes import free_ports
from tests.warm import COMMAND, PIPE, Python

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
