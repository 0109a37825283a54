"""`skirl verify` reports equal runs as equal, also of several trainers, and finds planted faults."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from skirl import cli
from skirl.cli.train import Verify
from skirl.core.optim import ROW_OPTIMIZERS
from skirl.core.tables import Schema
from skirl.engine import kernels
from skirl.engine.engine import Engine
from skirl.pipeline.pipeline import Pipeline
from skirl.train import verify_trainers as module
from skirl.train.verify import Trace, compare, in_plain_python

SMALL: dict[str, Any] = {
    "data": "synthetic:tiny", "dim": 4, "batch": 16, "steps": 25, "cache": "auto", "quiet": True,
}  # fmt: skip
FLAGS = "--data synthetic:tiny --dim 4 --batch 16 --steps 25 --quiet --threads 1".split()  # noqa: SIM905


@pytest.mark.parametrize(
    "flags",
    [
        {"depth": 1, "prefetch": 0}, {"depth": "epoch", "prefetch": 4}, {"policy": "lru", "pooling_factor": 3},
        {"model": "dlrm", "steps": 10},
    ],
    ids=str,
)  # fmt: skip
def test_equal_runs(flags):
    report = Verify.of(**{**SMALL, **flags}).run()
    (run,) = report["runs"]
    assert run["difference"] is None and report["failed"] is None
    assert run["moved"]["fetched"] > run["moved"]["forwarded"] > 0 == run["resident_moved"]["fetched"]
    assert run["rows"] == report["touched"] == run["resident_moved"]["new"]
    assert run["losses"] == Verify.of(**{**SMALL, **flags}).recipe.data.steps


@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS)
def test_rows_that_travel_to_a_disk_are_equal(optimizer, tmp_path):
    report = Verify.of(**{**SMALL, "store": f"disk:{tmp_path}", "optimizer": optimizer, "steps": 10}).run()
    assert report["failed"] is None and [*tmp_path.iterdir()]


# Planted faults. Each returns a function that gives the words that the command has to say.

SCHEMA = Schema.of(Verify.of(**SMALL).recipe.tables())


def a_fetched_row_with_one_wrong_bit(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Make a row wrong before the step that it was fetched for."""
    fetch, hit = Engine.fetch, []

    def faulty(self, work):
        fetch(self, work)
        (step,), (arrival,) = work.steps, work.fetched
        if step.number >= 9 and len(arrival) and not hit:
            arrival.numpy().view(np.uint32)[0, 1] ^= 1
            hit.append(step.number + 1)

    monkeypatch.setattr(Engine, "fetch", faulty)
    return lambda: "cache and resident differ " * len(hit)


def a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Make pooling wrong in the first sample of step 3, with both caches: only the reference shows it."""
    pool_for, calls = kernels.pool_for, []

    def faulty_for(*how):
        def faulty(*args):
            *_, out, _, _ = args
            pool_for(*how)(*args)
            calls.append(0)
            if len(calls) % 25 == 3:
                out[0, 0] += 0.5

        return faulty

    monkeypatch.setattr(kernels, "pool_for", faulty_for)
    return lambda: "cache and reference differ first in step 3: the losses are "


@pytest.mark.parametrize("fault", [a_fetched_row_with_one_wrong_bit, a_wrong_kernel])
def test_a_planted_fault_is_found(monkeypatch, capsys, fault):
    says = fault(monkeypatch)
    assert cli.main(["verify", *FLAGS, "--json"]) == 1
    caught = capsys.readouterr()
    assert says() and says() in caught.err and says() in json.loads(caught.out)["runs"][0]["difference"]


def test_a_fetch_that_does_not_wait_for_a_write_back_is_found(monkeypatch, capsys):
    """Whatever the seed and the machine: in every second turn, write-backs are slow until all else waits."""
    monkeypatch.setattr(Pipeline, "_may_read", lambda self, rows, after: self._fits(self._fetched_rows, rows))
    for seed in "0123456789":
        assert cli.main(["verify", *FLAGS, "--steps", "40", "--seed", seed]) != 0
        capsys.readouterr()


def test_a_run_that_refetches_nothing_has_shown_nothing(capsys):
    assert cli.main(["verify", *FLAGS, "--cache", "100%"]) == 1
    assert "nothing was shown: leave --cache out, or set more --steps" in capsys.readouterr().err


def trace(command: Verify) -> Trace:
    return in_plain_python(command.recipe)


def test_dense_parameters_rows_and_losses_are_all_compared():
    command = Verify.of(**{**SMALL, "steps": 3})
    one = trace(command)
    assert compare(one, trace(command), SCHEMA) is None

    def difference(change: Callable[[Trace], None]) -> str:
        other = trace(command)
        change(other)
        return str(compare(one, other, SCHEMA))

    def dense(other: Trace) -> None:
        other.dense["top.0.bias"].view(np.uint32)[0] ^= 1

    def loss(other: Trace) -> None:
        other.losses[1] = float(np.nextafter(other.losses[1], 0))

    def missing(other: Trace) -> None:
        other.keys, other.rows = other.keys[1:], other.rows[1:]

    def sign_of_zero(other: Trace) -> None:
        one.rows[2, 0], other.rows[2, 0] = 0.0, -0.0

    assert "at the end: in dense parameter top.0.bias" in difference(dense)
    assert "in step 2: the losses are" in difference(loss)
    assert "at the end: only reference has row 595 of table 'user'" in difference(missing)
    assert "at the end: in 1 rows, the first of them row " in difference(sign_of_zero)


@pytest.mark.parametrize("model", ["dlrm-tiny", "din-tiny", "dcat-tiny"])
def test_batches_that_share_bags(model):
    sessions = {"data": "synthetic:sessions", "pooling_factor": 5, "steps": 4, "shards": 2}
    report = Verify.of(**SMALL | sessions, model=model).run()
    assert report["runs"][0]["difference"] is None


TINY = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 16, "steps": 6, "quiet": True, "threads": 1}


@pytest.fixture
def one_case(monkeypatch):
    monkeypatch.setattr(module, "DEPTHS", (2,))
    monkeypatch.setattr(module, "STORES", ("disk",))


@pytest.mark.usefixtures("one_case", "python")
def test_two_processes_are_equal_to_the_reference_and_a_wrong_bit_is_named(monkeypatch):
    joined = module._joined

    def spoilt(folder, number, size) -> tuple[Trace, int]:
        trace, moved = joined(folder, number, size)
        if number == 1:  # the second of the three caches
            trace.rows[3].view(np.uint32)[0] ^= 1
        return trace, moved

    monkeypatch.setattr(module, "_joined", spoilt)
    found = Verify.of(**TINY, optimizer="adam", cache="touched:60%", shards=4, trainers="2").run()
    assert (found["runs"], found["differences"]) == (3, 1)
    assert found["failed"].startswith("1 of 3 runs differ: 2 trainers, cache ")
    assert "at the end: in 1 rows, the first of them row " in found["failed"]


@pytest.mark.usefixtures("python")
def test_a_trainer_that_is_refused_says_why(tmp_path):
    run = {"cache": 1, "depth": 1, "store": "memory"}
    with pytest.raises(ValueError, match=r"^one of 2 trainers failed: rank [01]: .*set cache to "):
        module._run(2, Verify.of(**TINY, shards=2).recipe, [run], tmp_path)


@pytest.mark.usefixtures("one_case", "python")
def test_tables_by_rows_whole_and_by_columns_are_equal_to_the_reference():
    found = Verify.of(
        **TINY | {"dim": 6, "steps": 12},
        optimizer="adam",
        cache="touched:40%",
        shards=4,
        trainers="3",
        placement="mixed",
    ).run()
    assert (found["runs"], found["differences"], found["failed"]) == (3, 0, None)


@pytest.mark.usefixtures("one_case", "python")
def test_samples_that_fill_no_whole_batch_are_left_out_at_the_end_of_each_epoch(tmp_path):
    lines = ["click,item"] + [f"{n % 2},{7 * n % 31}" for n in range(37)]
    (tmp_path / "clicks.csv").write_text("\n".join(lines))
    (tmp_path / "clicks.toml").write_text('[[label]]\nname = "click"\n[[id]]\nname = "item"\ntype = "int"\n')
    data = {"data": f"csv:{tmp_path / 'clicks.csv'}", "schema": tmp_path / "clicks.toml", "steps": None, "epochs": 2}
    found = Verify.of(**TINY | data, rows="40", optimizer="adam", cache=40, shards=2, trainers="2").run()
    assert (found["steps"], found["differences"]) == (4, 0)


@pytest.mark.usefixtures("one_case", "python")
def test_the_reference_has_as_many_threads_as_the_trainers():
    flags = {**TINY, "data": "synthetic:sessions", "model": "dcat-tiny", "batch": 64, "steps": 3, "pooling_factor": 6}
    torch.set_num_threads(2)
    found = Verify.of(**flags | {"threads": None}, cache="touched:60%", shards=2, trainers="2").run()
    assert (found["threads"], found["differences"]) == (1, 0)
