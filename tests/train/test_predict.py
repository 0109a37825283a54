"""Predictions of saved runs on real click logs, on numbered batches, and by several threads at once."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

import skirl
from skirl.cli.train import Evaluate, Predict, Train
from skirl.core.batch import Batch
from skirl.data import Synthetic
from skirl.data.flags import DataFlags
from skirl.models import DLRM
from skirl.train.metrics import Metrics, evaluating
from skirl.train.predict import scored, side_by_side
from tests.data import logs

FLAGS: dict[str, Any] = {"model": "dlrm-tiny", "dim": 8, "batch": 512, "rows": "2000", "cache": "40%", "quiet": True}


@pytest.mark.parametrize(
    ("data", "valid"), [("criteo:{}/criteo_first10k.tsv", "20%"), ("avazu:{}/avazu/train.csv", "15%")]
)
def test_predictions_of_real_click_logs_are_the_evaluation_of_their_run(data_folder, tmp_path, data, valid):
    data = data.format(data_folder)
    where = {"save": tmp_path / "run", "store": f"disk:{tmp_path / 'rows'}"}
    run = Train.of(**FLAGS, threads=2, data=data, valid=valid, **where).run()
    found = Evaluate(checkpoint=tmp_path / "run", held_out=True, quiet=True).run()
    Predict(checkpoint=tmp_path / "run", data=data, valid=valid, out=tmp_path / "p.parquet", quiet=True).run()
    table, metrics = pq.read_table(tmp_path / "p.parquet"), Metrics()
    for begin in range(0, len(table), 512):
        part = table.slice(begin, 512)
        metrics.update(part["logit"].to_numpy(), part["label"].to_numpy())
    assert len(table) == run["test_samples"] > 400
    for name in ("samples", "auc", "logloss", "ne", "calibration"):
        assert run[f"test_{name}"] == found[name] == getattr(metrics.scores(), name)


@pytest.mark.parametrize("kind", ["tsv", "gz", "parquet"])
@pytest.mark.parametrize("flags", [{}, {"bad_rows": "skip"}, {"valid": "30%"}, {"bad_rows": "skip", "valid": "30%"}])
def test_numbered_batches_are_the_batches_and_number_all_rows_of_all_files(tmp_path, kind, flags):
    rows = logs.criteo_rows(700, seed=3)
    if "bad_rows" in flags:
        for bad in (0, 1, 350, 690):
            rows[bad][0] = "7"
    for name, part in [("a", rows[:300]), ("b", rows[300:])]:
        if kind == "parquet":
            logs.write_parquet(tmp_path / f"{name}.parquet", part, group=70)
        else:
            logs.write_tsv(tmp_path / f"{name}.{kind}", part, packed=kind == "gz")
    found = DataFlags(f"criteo:{tmp_path}", batch=64, **flags).files(part_bytes=10_000)
    stream = found.held_out if "valid" in flags else found
    assert stream is not None
    pairs = list(stream.numbered())
    assert logs.samples_of([batch for batch, _ in pairs]) == logs.samples_of(list(stream))
    numbers = np.concatenate([numbers for _, numbers in pairs])
    first = 490 if "valid" in flags else 0
    assert numbers.tolist() == [i for i in range(first, 700) if rows[i][0] != "7"]
    labels = np.concatenate([batch.labels.numpy() for batch, _ in pairs])
    assert labels.tolist() == [float(rows[i][0]) for i in numbers]


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
    with evaluating(model, batches()) as found, torch.no_grad():
        expected = [model(batch) for batch in found]
    told = Told(model, when)
    found = list(scored(told, batches(), 2))
    assert [batch.labels.tolist() for batch, _ in found] == [batch.labels.tolist() for batch in batches()]
    for (batch, logits), plain in zip(found, expected, strict=True):
        said = 2000 if when == "always" or (when == "odd" and len(batch.labels) == 17) else 0
        assert torch.equal(logits, plain + said)
    apart = {name for name in told.by if name.startswith("skirl-side")}
    assert bool(apart) == (when != "always")


def test_an_error_ends_what_is_done_side_by_side() -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise KeyError("read")

    cases = (iter(range(9)), lambda n: 1 // (3 - n), ZeroDivisionError, 3), (items(), lambda n: n, KeyError, 2)
    for coming, work, error, before in cases:
        found = []
        with pytest.raises(error), side_by_side(work, coming, 3) as results:
            for result in results:
                found.append(result)
        assert len(found) == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("skirl-side")]
