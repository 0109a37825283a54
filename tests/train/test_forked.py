"""Processes that predict: they give the logits of batches run one after another, and end whatever happens to them."""

import os
import signal

import pytest
import torch
from torch import Tensor, nn

import skirl
import skirl.train.forked as forked_module
from skirl.core.batch import Batch, KeyedJagged
from skirl.data import Synthetic
from skirl.models import DLRM
from skirl.train.evaluation import predicted
from skirl.train.forked import ProcessDied, _packed, _unpacked, forked
from skirl.train.scored import scored


@pytest.fixture(scope="module")
def model() -> nn.Module:
    rows = skirl.EmbeddingBagCollection(Synthetic("tiny").tables(4), optimizer=skirl.SGD(lr=0.1), cache=100)
    return DLRM.tiny(rows, dense_features=4)


class Told(nn.Module):
    """Adds to the logits, where `when` says so, the number of threads in use, and notes which batches were computed here."""

    def __init__(self, model: nn.Module, when: str) -> None:
        super().__init__()
        self.model, self.when, self.process = model, when, os.getpid()
        self.here: list[int] = []

    def forward(self, batch: Batch) -> Tensor:
        self.here.append(len(batch.labels))
        told = self.when == "always" or (self.when == "odd" and len(batch.labels) != 64)
        if self.when == "error" and os.getpid() != self.process:
            raise ValueError("this model fails")
        return self.model(batch) + (1000 * torch.get_num_threads() if told else 0)


def batches(count: int = 10) -> list[Batch]:
    """Return `count` batches of one size and a smaller one; some have weights."""
    found = [*Synthetic("tiny", batch_size=64, batches=count), *Synthetic("tiny", batch_size=17, batches=1, seed=1)]
    for batch in found[3:5]:
        ids = batch.sparse
        weights = torch.linspace(0, 1, len(ids.values()))
        batch.sparse = KeyedJagged(ids.keys(), ids.values(), lengths=ids.lengths(), weights=weights)
    return found


@pytest.mark.parametrize("when", ["never", "odd", "always"])
def test_logits_are_those_of_one_batch_after_the_other(model: nn.Module, when: str) -> None:
    before, told = torch.get_num_threads(), Told(model, when)
    expected = [logits for _, logits in predicted(model, batches())]
    with forked(told, 3) as team:
        found = list(scored(told, batches(), 2, team))
    assert torch.get_num_threads() == before and told.training
    assert [batch.labels.tolist() for batch, _ in found] == [batch.labels.tolist() for batch in batches()]
    for (batch, logits), plain in zip(found, expected, strict=True):
        said = 2000 if when == "always" or (when == "odd" and len(batch.labels) == 17) else 0
        assert torch.equal(logits, plain + said)
    # The first batch runs here twice, and the odd one once, all others in the processes; or all run here.
    assert told.here == ([64, 64, 17] if when != "always" else [64] * 11 + [17])


@pytest.mark.parametrize("room", [forked_module.ROOM, 4096, 1])
def test_many_batches_go_through_shared_memory_and_what_is_too_large_for_it_through_pipes(
    model: nn.Module, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_module, "ROOM", room)
    expected = [logits for _, logits in predicted(model, batches(40))]
    with forked(model, 2) as team:
        found = [logits for _, logits in scored(model, batches(40), 2, team)]
    assert len(found) == len(expected) == 41
    assert all(torch.equal(one, plain) for one, plain in zip(found, expected, strict=True))


def test_where_there_is_no_shared_memory_all_goes_through_pipes(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(count: int, size: int) -> None:
        raise OSError(12, "no memory")

    monkeypatch.setattr(forked_module, "SharedSlots", none)
    expected = [logits for _, logits in predicted(model, batches())]
    with forked(model, 2) as team:
        assert [one.equal(plain) for (_, one), plain in zip(scored(model, batches(), 2, team), expected)] == [True] * 11


def test_an_error_of_theirs_is_raised_here(model: nn.Module) -> None:
    told = Told(model, "error")
    with pytest.raises(ValueError, match="this model fails"), forked(told, 2) as team:
        list(scored(told, batches(), 2, team))


@pytest.mark.parametrize("at", [1, 5])
def test_one_of_them_that_dies_is_named(model: nn.Module, at: int) -> None:
    with pytest.raises(ProcessDied, match=r"exit code -9\): .*Set threads to 1"), forked(model, 2) as team:
        for number, _ in enumerate(scored(model, batches(40), 2, team), start=1):
            if number == at:
                os.kill(team._team[1][0].pid, signal.SIGKILL)


def test_who_takes_no_more_ends_them(model: nn.Module) -> None:
    """Even if a process is waiting to hand over a result, or the thread that reads for it is."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Batch) -> Tensor:
            return torch.zeros(len(batch.labels), 1 << 12)

    large = Large()
    with forked(large, 2) as team:
        found = scored(large, batches(40), 2, team)
        next(found)
        next(found)
        pids = [process.pid for process, *_ in team._team]
        found.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_is_sent_arrives() -> None:
    for batch in batches():
        again = _unpacked(*_packed(batch))
        assert again.dense.equal(batch.dense) and again.labels.equal(batch.labels)
        assert again.sparse.keys() == batch.sparse.keys() and again.sparse.values().equal(batch.sparse.values())
        assert again.sparse.offsets().equal(batch.sparse.offsets())
        weights, came = batch.sparse.weights_or_none(), again.sparse.weights_or_none()
        assert (weights is None) == (came is None) and (weights is None or weights.equal(came))
