"""Habits around sizes and scales: a first guess at the cache size, and a GradScaler as in plain PyTorch."""

import re

import pytest
import torch

import skirl

BATCHES = [skirl.KeyedJagged.one_hot(["item"], torch.arange(n)[:, None]) for n in (2, 3, 9, 4, 12, 5)]


def rows(**more: object) -> skirl.EmbeddingBagCollection:
    return skirl.EmbeddingBagCollection([skirl.Table("item", rows=50, dim=4)], optimizer=skirl.SGD(lr=0.1), **more)  # type: ignore[arg-type]


def steps(cache: int | str, depth: int | str) -> int:
    model = rows(cache=cache)
    with skirl.lookahead(BATCHES, model, sparse=lambda ids: ids, depth=depth) as batches:  # type: ignore[arg-type]
        for ids in batches:
            model(ids)["item"].sum().backward()
        return batches.step


@pytest.mark.parametrize("depth", ["auto", "epoch"])
@pytest.mark.parametrize("guess", [2, "64B"])
def test_guessing_a_cache_and_taking_the_size_that_the_error_names(guess: int | str, depth: str):
    with pytest.raises(ValueError, match="set cache to") as refused:
        steps(guess, depth)
    named = re.search(r"set cache to (\d+)(?: bytes)? or more(?: \('(\d+B)'\))?", str(refused.value))
    assert named
    assert steps(named[2] or int(named[1]), depth) == len(BATCHES), "once is enough"
