"""Metrics of several trainers: they have the bits of one process, whoever had which batch."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import skirl
from skirl.data import Synthetic
from skirl.models import DLRM, DCNv2, DeepFM, WideDeep
from skirl.train.evaluation import evaluate
from skirl.train.metrics import Metrics, NotFinite
from skirl.train.parts import MetricsPart, merged
from tests.cases import cases
from tests.train.test_metrics import sample


@cases(30)
@given(
    st.lists(st.integers(1, 60), max_size=12), st.integers(1, 8), st.integers(0, 4), st.integers(0, 10_000), st.data()
)
def test_parts_merge_to_the_bits_of_one_process(
    sizes: list[int], ranks: int, before: int, seed: int, data: st.DataObject
) -> None:
    logits, labels = sample(sum(sizes), seed)
    cuts = np.cumsum(sizes)[:-1]
    batches = list(zip(np.split(logits, cuts), np.split(labels, cuts))) if sizes else []
    alone, together = Metrics(), Metrics()
    parts = [MetricsPart() for _ in range(ranks)]
    of = [data.draw(st.integers(0, ranks - 1)) for _ in batches]
    for number, (x, y) in enumerate(batches):
        alone.update(torch.tensor(x), torch.tensor(y))
        if number < before:
            together.update(torch.tensor(x), torch.tensor(y))
        else:
            parts[of[number]].update(number, torch.tensor(x), torch.tensor(y))
    arrays = [part.arrays() for part in parts]
    assert all(array.ndim == 1 and array.dtype.kind in "if" for part in arrays for array in part)
    found = merged(data.draw(st.permutations(arrays)), into=together)
    assert found.scores() == alone.scores()
    theirs, ours = found.state_dict(), alone.state_dict()
    assert theirs["loss"] == ours["loss"]
    assert torch.equal(theirs["auc"]["counts"], ours["auc"]["counts"])


def arrays_of(*numbers: int, value: float = 0.5) -> list[np.ndarray]:
    part = MetricsPart()
    for number in numbers:
        part.update(number, np.array([value, 1.0]), np.array([0, 1]))
    return part.arrays()


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ((arrays_of(0, 3), arrays_of(1)), "3 batches between 0 and 3 were counted: some are missing"),
        ((arrays_of(0, 1), arrays_of(1)), "3 batches between 0 and 1 were counted"),
    ],
)
def test_a_batch_that_is_missing_or_there_twice_is_said(parts: Any, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        merged(parts)


def test_all_trainers_hear_that_one_has_no_finite_predictions() -> None:
    parts = [arrays_of(0), arrays_of(2, value=np.nan), arrays_of(1, value=np.inf)]
    with pytest.raises(NotFinite, match="1 of 2 logits are not finite"):
        merged(parts)


@pytest.mark.parametrize("kind", [DLRM, DCNv2, DeepFM, WideDeep])
def test_trainers_evaluate_together_as_one(kind: Any) -> None:
    data = Synthetic("tiny", batch_size=32, batches=4)
    embeddings = skirl.EmbeddingBagCollection(data.tables(4), optimizer=skirl.SGD(lr=0.1), cache=1000)
    model = kind.tiny(embeddings, dense_features=4)
    told: list[Any] = []

    def exchange(arrays: list[np.ndarray]) -> list[list[np.ndarray]]:
        told.append(arrays)
        return told

    alone = evaluate(model, data)
    for rank in range(3):
        if rank < 2:  # the others are not merged yet, so batches are missing
            with pytest.raises(ValueError, match="batches"):
                evaluate(model, data.dealt(rank, 3), rank=rank, ranks=3, exchange=exchange)
        else:
            assert evaluate(model, data.dealt(rank, 3), rank=rank, ranks=3, exchange=exchange) == alone
    assert [len(part[0]) for part in told] == [2, 1, 1]
