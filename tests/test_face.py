"""The face: the examples of the README run as they are written."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import skirl
from tests.streams import jagged

EXAMPLES = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)
SMALLER = {'cache="4GiB"': 'cache="24KiB"', "10_000 == 0": "10 == 0"}
STEPS = 40


class MyModel(nn.Module):
    """The model that the example leaves to its reader."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = embeddings
        self.top = nn.Linear(3 * 64, 1)
        self.losses: list[float] = []

    def loss(self, batch: skirl.Batch) -> torch.Tensor:
        out = self.embeddings(batch.sparse)
        assert out["clicked"].shape == (8, 64) and out.stacked().shape == (8, 3, 64)
        logits = self.top(torch.cat([out[name] for name in ("user", "clicked", "bought")], 1))[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        self.losses.append(loss.item())
        return loss


def batches() -> list[skirl.Batch]:
    """Return batches of users and items from the whole tables, some of them frequent."""
    rng, out = np.random.default_rng(0), []
    for _ in range(STEPS):
        sparse = jagged(rng, {"user": 30, "clicked": 60, "bought": 60}, 8, most=2, one=["user"])
        labels = (sparse.values()[:8] % 2).float()
        sparse.values()[:] *= 333_333
        out.append(skirl.Batch(torch.empty(8, 0), sparse, labels))
    return out


def test_the_loop_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = EXAMPLES[1]
    for old, new in SMALLER.items():
        assert code.count(old) == 1, f"{old} is not in the example"
        code = code.replace(old, new)
    names: dict[str, Any] = {"MyModel": MyModel, "loader": batches()}
    exec(compile(code, "face", "exec"), names)
    model, counters = names["model"], names["embeddings"].engine.counters
    assert names["batches"].step == STEPS == len(model.losses)
    assert counters.fetched > 100, "the cache was to be smaller than what is used"
    assert model.losses[-1] < model.losses[0]
    assert (tmp_path / "checkpoint").is_dir()
    assert sum(p.numel() for p in model.parameters()) == 3 * 64 + 1  # rows are not Parameters


def test_the_first_example_of_the_readme_runs_as_it_stands(capsys):
    exec(compile(EXAMPLES[0], "README", "exec"), {})
    assert capsys.readouterr().out.startswith("user: Embedding(10000, 8)")
