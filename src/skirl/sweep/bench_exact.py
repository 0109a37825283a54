"""Run `skirl verify --vary` over all models and all ways to look rows up: every bit must equal that of a lone run."""

from collections.abc import Sequence
from typing import Any

from skirl.sweep.variants import variants_of
from skirl.sweep.verify import verify_variants
from skirl.train.recipe import Recipe

POOLED = ("dlrm-tiny", "wide-deep-tiny", "deep-cross-tiny", "deepfm-tiny", "dcnv2-tiny")
OF_LISTS = ("din-tiny", "dcat-tiny")
"""Models that attend to a list, so its rows are not pooled."""
SETS = {
    "one id": ({"data": "synthetic:tiny"}, (*POOLED, *OF_LISTS)),
    "bags": ({"data": "synthetic:tiny", "pooling_factor": 3}, (*POOLED, *OF_LISTS)),
    "sessions": ({"data": "synthetic:sessions", "pooling_factor": 4}, POOLED),
    "unpooled sessions": ({"data": "synthetic:sessions", "pooling_factor": 4}, OF_LISTS),
}  # fmt: skip
"""Kinds of data, each with the models that train together on it."""
CACHE = "touched:60%"
"""Used instead of a cache that might hold all rows, so that rows leave the cache and come back."""


def exact(recipe: Recipe, steps: int, dims: Sequence[int] = (4, 6)) -> dict[str, Any]:
    """Verify all models on each kind of data, each with several dims.

    **Arguments**

    - `recipe`: gives the batch size, cache and optimizer.
    - `steps`: steps of each run.
    - `dims`: dims of rows to try.
    """
    found = {}
    tight = {} if recipe.cache.parsed()[0] in ("rows", "touched") else {"cache": CACHE}
    for name, (data, models) in SETS.items():
        own = Recipe.of(**recipe.flat() | {"steps": steps, "model": models[0], **tight, **data})
        vary = (f"model={','.join(models)}", f"dim={','.join(map(str, dims))}")
        found[name] = verify_variants(own, variants_of(own, vary))
    return {
        "sets": found,
        "runs": sum(one["runs"] for one in found.values()),
        "differences": sum(one["differences"] for one in found.values()),
        "bits_equal": all(one["bits_equal"] for one in found.values()),
    }
