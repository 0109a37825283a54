"""Plans are sent from the first rank to the others as text."""

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from skirl.placement.torchrec import telling
from tests.warm import PIPE, Python

TWO = """
import json, sys
import torch.distributed as dist
from skirl.placement.torchrec.telling import told

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
print(json.dumps([told({"plan": "é" * 5000} if rank == 0 else "not looked at"), told([rank])]))
dist.destroy_process_group()
"""

PLANNED = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch, torchrec
import torch.distributed as dist
from torchrec.distributed.planner.types import Topology
from skirl.torchrec import SkirlPlanner

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
configs = [torchrec.EmbeddingBagConfig(name=f"t{n}", num_embeddings=50 + n, embedding_dim=8, feature_names=[f"f{n}"])
           for n in range(3)]
model = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
said = []
for cap in (1 << 30, 100):
    planner = SkirlPlanner(Topology(2, "cpu", ddr_cap=cap, local_world_size=2), 16, seconds=0.2, seed=rank)
    try:
        said += [str(planner.collective_plan(model)), planner.table_plan.body(), planner.summary()]
    except ValueError as error:
        said.append(str(error))
print(json.dumps(said))
dist.destroy_process_group()
"""


def both(python: Python, code: str, folder: Any) -> list[Any]:
    team = [python.start(code, str(folder), str(rank), stdout=PIPE) for rank in range(2)]
    return [json.loads(process.communicate(250)[0].splitlines()[-1]) for process in team]


def test_all_ranks_hear_what_the_first_says(python: Python, tmp_path):
    assert both(python, TWO, tmp_path) == [[{"plan": "é" * 5000}, [0]]] * 2


def test_too_many_bytes_are_refused_before_there_is_room_for_them(monkeypatch):
    def huge(tensor: torch.Tensor, src: int, group: Any = None) -> None:
        assert tensor.numel() == 1, "room was made"
        tensor.fill_(1 << 40)

    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "gloo")
    monkeypatch.setattr(dist, "broadcast", huge)
    with pytest.raises(ValueError, match=r"tells 1,099,511,627,776 bytes, and at most"):
        telling.told(None)


@pytest.mark.slow  # two processes import TorchRec
def test_all_ranks_have_the_plan_of_the_first_or_its_error(python: Python, tmp_path):
    pytest.importorskip("torchrec", reason="not installed: constraints/others.txt")
    first, second = both(python, PLANNED, tmp_path)
    assert first[:2] == second[:2] and "busiest" in first[2] and "nothing was planned here" in second[2]
    assert first[3] == second[3] and "set --memory higher" in first[3]
