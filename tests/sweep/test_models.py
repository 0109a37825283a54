"""All models, over rows that are pooled and over lists, train together to the bits of their single runs."""

from typing import Any

import pytest
import torch

from skirl.pipeline.lookahead import lookahead
from skirl.sweep.entrant import sweep_of
from skirl.sweep.sweep import Sweep
from skirl.sweep.variants import Varied, variants_of
from skirl.train.loop import steps, touched_rows
from skirl.train.recipe import Recipe
from tests.sweep.runs import rows_of

POOLED = ("dlrm-tiny", "wide-deep-tiny", "deep-cross-tiny", "deepfm-tiny", "dcnv2-tiny")
OF_LISTS = ("din-tiny", "dcat-tiny")
"""Models that attend to a list, so its rows are not pooled."""
SETS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "bags": ({"data": "synthetic:tiny", "pooling_factor": 3}, ("dlrm-tiny", "din-tiny")),
    "sessions": ({"data": "synthetic:sessions", "pooling_factor": 4}, POOLED),
    "unpooled sessions": ({"data": "synthetic:sessions", "pooling_factor": 4}, OF_LISTS),
}
Left = tuple[list[float], dict[str, bytes], dict[int, bytes], bytes]
"""Losses, weights and rows that a variant leaves, and what it predicts for the first batch."""


def left(recipe: Recipe, losses: list[float], model: torch.nn.Module, embeddings: Any) -> Left:
    with torch.no_grad():
        predicted = model.eval()(next(iter(recipe.stream()))).numpy().tobytes()
    weights = {name: w.detach().numpy().tobytes() for name, w in model.named_parameters() if "anchor" not in name}
    return losses, weights, {key: row.tobytes() for key, row in rows_of(embeddings).items()}, predicted


def alone(recipe: Recipe, variant: Varied) -> Left:
    embeddings = variant.recipe.embeddings(recipe.cache_size(touched_rows(recipe)), store="memory")
    model, dense = variant.recipe.model_over(embeddings)
    with recipe.lookahead(model) as batches:
        losses = [float(done.loss_tensor) for done in steps(model, dense, batches, None)]
    return left(recipe, losses, model, embeddings)


def check(recipe: Recipe, vary: list[str]) -> Sweep:
    """Train variants together and each alone, and compare what they leave."""
    variants = variants_of(recipe, vary)
    losses: dict[str, list[float]] = {variant.name: [] for variant in variants}
    with sweep_of(recipe, variants) as sweep, lookahead(recipe.stream(), sweep, depth=4) as batches:
        for batch in batches:
            for name, loss in sweep.step(batch).items():
                losses[name].append(loss)
        batches.close()
        found = {v.name: left(recipe, losses[v.name], v.model, v.embeddings) for v in sweep}
        for variant in variants:
            for ours, theirs in zip(found[variant.name], alone(recipe, variant), strict=True):
                assert ours == theirs, variant.name
        return sweep


@pytest.fixture(autouse=True)
def form() -> None:
    """The faster one."""


@pytest.mark.parametrize("name", SETS)
def test_all_models_train_as_alone(name: str):
    data, models = SETS[name]
    recipe = Recipe.of(**data, model=models[0], dim=4, batch=8, steps=12, cache="touched:40%", depth=4, threads=1)
    sweep = check(recipe, [f"model={','.join(models)}", "dim=4,16"])
    assert all(v.embeddings.engine.counters.fetched for v in sweep.variants), "no row was fetched again"
