"""A sweep on the ranks of a job: each plans and trains some of the variants. What they tell each other."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from skirl.engine.capacity import AUTO, DoesNotFit
from skirl.peers.base import Peers
from skirl.store import inside
from skirl.sweep.variants import Varied
from skirl.tools.machine import cores, free_bytes
from skirl.tools.os_errors import NotWritten
from skirl.train.loop import touched_rows
from skirl.train.recipe import Recipe

WORTH = 1 << 21
"""Least work that is worth several processes, in samples times variants. A step takes as long as 512 samples more."""
FEWEST = 2
"""Fewest variants a process trains on average: reading and planning take as long as training two tiny models."""


def how_many(asked: int | str, recipe: Recipe, variants: int) -> int:
    if asked != "auto":
        check_alone(int(asked), recipe)
        return min(int(asked), variants)
    steps = recipe.stream().steps or recipe.data.steps or WORTH
    if recipe.device.device != "cpu" or steps * variants * (recipe.data.batch + 512) < WORTH:
        return 1
    return max(1, min(cores() // (recipe.device.threads or 1), variants // FEWEST))


def check_alone(processes: int, recipe: Recipe) -> None:
    if processes > 1 and recipe.device.device != "cpu":
        raise ValueError(f"processes is {processes}, and one process has the device: set processes to 1")


def dealt(variants: Sequence[Varied], count: int) -> list[list[Varied]]:
    """Assign variants to ranks, the widest in turn, so that all take about as long."""
    order = sorted(range(len(variants)), key=lambda n: -_numbers([variants[n]]))
    return [[variants[n] for n in sorted(order[first::count])] for first in range(count)]


def _numbers(variants: Sequence[Varied]) -> int:
    return sum(one.recipe.row_optimizer().width(one.recipe.model.row_dim) for one in variants)


def share_of(recipe: Recipe, variants: Sequence[Varied], rank: int, size: int) -> tuple[Recipe, Sequence[Varied]]:
    """Return a rank's part: the recipe with its store and, if it is given in bytes, its part of the cache; its variants."""
    if size == 1:
        return recipe, variants
    if size > (most := len(variants)):
        raise ValueError(f"there are {size} processes, more than variants that race: launch -n {most}, or fewer")
    own = dealt(variants, size)[rank]
    if recipe.counts_first:
        recipe = replace(recipe, cache=replace(recipe.cache, cache=str(recipe.cache_size(touched_rows(recipe)))))
    (kind, amount), cache = recipe.cache.parsed(), recipe.cache.cache
    if kind in ("bytes", "auto"):
        whole = amount if kind == "bytes" else AUTO * free_bytes()
        cache = f"{int(whole * _numbers(own) / _numbers(variants))}B"
    store = inside(recipe.cache.store, f"process-{rank}")
    return replace(recipe, cache=replace(recipe.cache, cache=cache, store=store)), own


def of_whole(error: DoesNotFit, variants: Sequence[Varied], size: int) -> DoesNotFit:
    """Return the error in terms of the whole sweep: a rank knows only its own share of the cache."""
    if size == 1 or not error.in_bytes:
        return error
    enough = -(-error.enough * _numbers(variants) // min(map(_numbers, dealt(variants, size))))
    return DoesNotFit(f"{error.found} in one of {size} processes, which share the cache", enough, True)


class Ranks:
    """Calls that all ranks make at once. A sweep in one process is its only rank."""

    def __init__(self, peers: Peers) -> None:
        self.peers, self.rank, self.size, self.first = peers, peers.rank, peers.size, peers.rank == 0
        self._channel = peers.channel("lookups")

    def told(self, own: Any, what: str) -> list[Any]:
        if self.size == 1:
            return [own]
        return self._channel.told(json.loads(json.dumps(own, default=str)), what)

    def joined(self, own: Mapping[str, Any], what: str) -> dict[str, Any]:
        return {name: of for one in self.told(own, what) for name, of in one.items()}

    def written(self, write: Callable[[], Any], what: str) -> list[Any]:
        """Write on all ranks, and return what each tells of it. What one of them cannot write is an error on all."""
        try:
            done = write(), None
        except NotWritten as error:
            done = None, (str(error), error.errno)
        found, failed = zip(*self.told(done, what), strict=True)
        if (why := next(filter(None, failed), None)) is not None:
            raise NotWritten(*why)
        return list(found)
