"""The face: the example that skirl was designed around runs as it is written, and the README shows it."""

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import skirl
from tests.streams import jagged

EXAMPLES = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)
# fmt: off
FACE = """
import torch, skirl

tables = [
    skirl.Table("user", rows=10_000_000, dim=64),
    skirl.Table("item", rows=50_000_000, dim=64, features=("clicked", "bought"), pooling="mean"),
]
embeddings = skirl.EmbeddingBagCollection(
    tables,
    optimizer=skirl.RowwiseAdagrad(lr=0.02),
    cache="4GiB",                       # of the device; or "10%" of the tables' rows, or an int: rows
    store="disk:rows/",                 # "memory" | "disk:PATH" | "rpc://HOST:PORT" | "disk:A,disk:B*2"; resume=True keeps its rows
    device="cuda", seed=0,
)
model = MyModel(embeddings)             # embeddings(batch.sparse)["clicked"] is a [batch, dim] tensor; .stacked() is [batch, features, dim]
dense = torch.optim.Adam(model.parameters(), lr=1e-3)     # rows are no Parameters: they have their own optimizer

with skirl.lookahead(loader, model) as batches:           # sparse=lambda b: b.sparse, depth="auto", prefetch=2
    for batch in batches:
        loss = model.loss(batch)
        loss.backward()                 # rows are updated here
        dense.step(); dense.zero_grad()
        if batches.step % 10_000 == 0:
            skirl.save("checkpoint/", model=model, optimizers=[dense], data=batches)
"""  # noqa: E501
# fmt: on
NO_GPU = {'device="cuda"': 'device="cpu"'}
IN_MEMORY = {'store="disk:rows/"': 'store="memory"'}
SMALLER = {'cache="4GiB"': 'cache="24KiB"', "10_000 == 0": "10 == 0"}
STEPS = 40


def example(replacements: dict[str, str]) -> str:
    code = FACE
    for old, new in replacements.items():
        assert code.count(old) == 1, f"{old} is not in the example"
        code = code.replace(old, new)
    return code


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


def run(code: str) -> dict[str, Any]:
    names = {"MyModel": MyModel, "loader": batches()}
    exec(compile(code, "face", "exec"), names)
    return names


def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run(example(NO_GPU | SMALLER))
    model, counters = names["model"], names["embeddings"].engine.counters
    assert names["batches"].step == STEPS == len(model.losses)
    assert counters.fetched > 100, "the cache was to be smaller than what is used"
    assert model.losses[-1] < model.losses[0]
    assert (tmp_path / "checkpoint").is_dir()
    assert sum(p.numel() for p in model.parameters()) == 3 * 64 + 1  # rows are not Parameters


def test_the_readme_shows_it():
    """The same statements, ignoring layout and comments, with rows on disk or in memory."""
    faces = [example(some) for some in ({}, NO_GPU, NO_GPU | IN_MEMORY)]
    assert ast.dump(ast.parse(EXAMPLES[1])) in [ast.dump(ast.parse(face)) for face in faces]


def test_the_first_example_of_the_readme_runs_as_it_stands(capsys):
    exec(compile(EXAMPLES[0], "README", "exec"), {})
    assert capsys.readouterr().out.startswith("user: Embedding(10000, 8)")
