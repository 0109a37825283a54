"""Batches computed by several threads at once give the same logits as one after another, whatever bits threads produce."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import skirl
from skirl.core.batch import Batch
from skirl.data import Synthetic
from skirl.models import DLRM
from skirl.train.evaluation import predicted
from skirl.train.predict import scored


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


@pytest.fixture(scope="module")
def model() -> nn.Module:
    rows = skirl.EmbeddingBagCollection(Synthetic("tiny").tables(4), optimizer=skirl.SGD(lr=0.1), cache=100)
    return DLRM.tiny(rows, dense_features=4)


class Told(nn.Module):
    """Adds to the logits, where `when` says so, the number of threads in use."""

    def __init__(self, model: nn.Module, when: str) -> None:
        super().__init__()
        self.model, self.when = model, when
        self.by: set[str] = set()

    def forward(self, batch: Batch) -> Tensor:
        self.by.add(threading.current_thread().name)
        told = self.when == "always" or (self.when == "odd" and len(batch.labels) != 64)
        return self.model(batch) + (1000 * torch.get_num_threads() if told else 0)


def batches() -> list[Batch]:
    """Return ten batches of one size, and a smaller one."""
    return [*Synthetic("tiny", batch_size=64, batches=10), *Synthetic("tiny", batch_size=17, batches=1, seed=1)]


@pytest.mark.parametrize("when", ["never", "odd", "always"])
def test_logits_are_those_of_one_batch_after_the_other(model: nn.Module, when: str) -> None:
    expected = [logits for _, logits in predicted(model, batches())]
    told = Told(model, when)
    found = list(scored(told, batches(), 2))
    assert [batch.labels.tolist() for batch, _ in found] == [batch.labels.tolist() for batch in batches()]
    for (batch, logits), plain in zip(found, expected, strict=True):
        said = 2000 if when == "always" or (when == "odd" and len(batch.labels) == 17) else 0
        assert torch.equal(logits, plain + said)
    apart = {name for name in told.by if name.startswith("skirl-side")}
    assert bool(apart) == (when != "always")


def test_a_model_of_other_ids_than_the_batch_and_one_thread(model: nn.Module) -> None:
    class Copied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Batch) -> Tensor:
            ids = batch.sparse
            again = skirl.KeyedJagged(ids.keys(), ids.values().clone(), offsets=ids.offsets())
            return self.model(Batch(batch.dense, again, batch.labels))

    expected = [logits for _, logits in predicted(model, batches())]
    for count, inner in ((2, Copied()), (1, model)):
        found = [logits for _, logits in scored(inner, batches(), count)]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
