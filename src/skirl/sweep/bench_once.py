"""Check that several variants on one stream read, hash and plan no more than one variant does."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from skirl.core.batch import Batch
from skirl.data.source import Source
from skirl.pipeline.lookahead import lookahead
from skirl.sweep.crew import sweep_of
from skirl.sweep.variants import Varied
from skirl.train.recipe import Recipe


class _Counted:
    """A stream that counts the batches and ids taken from it."""

    def __init__(self, stream: Source) -> None:
        self._stream = stream
        self.batches = 0
        self.ids = 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._stream:
            self.batches += 1
            self.ids += len(batch.sparse.values())
            yield batch


def once(recipe: Recipe, counts: Sequence[int], steps: int) -> dict[str, Any]:
    """Count, for each number of variants, batches read, ids in them, ids checked and hashed, and steps planned.

    **Arguments**

    - `recipe`: what the variants have in common; they differ in their learning rates.
    - `counts`: numbers of variants to try.
    - `steps`: batches in the stream.
    """
    recipe = replace(recipe, data=replace(recipe.data, steps=steps))
    found = [_of(recipe, count) for count in counts]
    same = ("read_batches", "read_ids", "hashed_ids", "plans")
    return {
        "by_variants": found,
        "once": all(one[name] == found[0][name] for one in found for name in same),
        "read_batches": max(one["read_batches"] for one in found),
        "hashed_ids": max(one["hashed_ids"] for one in found),
        "plans": max(one["plans"] for one in found),
    }


def _of(recipe: Recipe, count: int) -> dict[str, Any]:
    rates = [recipe.rates.lr * (1 + n / count) for n in range(count)]
    variants = [
        Varied(f"lr-{n}", {"lr": lr}, recipe=replace(recipe, rates=replace(recipe.rates, lr=lr)))
        for n, lr in enumerate(rates)
    ]
    stream = _Counted(recipe.stream())
    trained = 0
    with (
        sweep_of(recipe, variants, form="loop") as sweep,
        lookahead(stream, sweep, depth=recipe.cache.depth) as batches,
    ):
        for batch in batches:
            trained += len(sweep.step(batch))
    return {
        "variants": count, "variant_steps": trained, "read_batches": stream.batches, "read_ids": stream.ids,
        "hashed_ids": sweep.fleet.resolver.ids, "plans": sweep.plans,
    }  # fmt: skip
