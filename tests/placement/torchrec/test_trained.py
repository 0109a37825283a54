"""Plans that TorchRec runs train what plain torch trains."""

import json

import pytest
import torch
import torch.distributed as dist

from tests.placement.torchrec import model
from tests.warm import PIPE, Python

pytest.importorskip("torchrec", reason="not installed: constraints/others.txt")
pytestmark = pytest.mark.filterwarnings("ignore")

TWO = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch.distributed as dist
from tests.placement.torchrec.model import differences

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
print(json.dumps(differences(10, 1)))
dist.destroy_process_group()
"""


def alike(found: dict[str, float]) -> bool:
    adagrad = found.pop("columns, rowwise-adagrad")
    return len(found) == 7 and max(found.values()) < 1e-4 < 1e-3 < adagrad  # each part of a row has a different number


def test_at_one_rank(tmp_path, monkeypatch):
    """Nothing is exchanged, but kernels, optimizers and the dense part are those used with two."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    threads = torch.get_num_threads()
    try:
        assert alike(model.differences(2, 0))
    finally:
        torch.set_num_threads(threads)
        dist.destroy_process_group()


@pytest.mark.slow  # two processes import TorchRec
def test_at_two_ranks(python: Python, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    team = [python.start(TWO, str(tmp_path), str(rank), stdout=PIPE) for rank in range(2)]
    first, second = (json.loads(process.communicate(250)[0].splitlines()[-1]) for process in team)
    assert first == second and alike(first)
