"""A store on disk has all rows when a lookahead has ended, without a call of close()."""

import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import skirl
from skirl.store import DiskStore
from tests.warm import Python

LOOP = """
import sys
import torch, skirl

def batches(first, last):
    for n in range(first, last):
        yield skirl.KeyedJagged.one_hot(["user"], torch.arange(7 * n, 7 * n + 40)[:, None] % 300)

def train(first, last, **options):
    tables = [skirl.Table("user", rows=300, dim=4)]
    embeddings = skirl.EmbeddingBagCollection(
        tables, optimizer=skirl.RowwiseAdagrad(lr=0.1), cache=120, store="STORE", **options)
    with skirl.lookahead(batches(first, last), embeddings, sparse=lambda ids: ids) as ahead:
        for ids in ahead:
            if ahead.step == FAILS:
                raise KeyError("in the loop")
            (embeddings(ids)["user"] - 1).square().sum().backward()
"""


def loop(store: str, call: str, fails: int = 0) -> str:
    return LOOP.replace("STORE", store).replace("FAILS", str(fails)) + f"\n{call}\n"


def rows_in(folder: Path) -> dict[int, bytes]:
    with DiskStore(folder, {0: skirl.store.Record(5)}) as store:
        out = {}
        for keys in store.held():
            rows = torch.empty(len(keys), 5).numpy()
            assert store.read(keys, rows).all()
            out |= {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}
    return out


def test_a_loop_without_close_leaves_its_rows(python: Python, tmp_path: Path):
    half, whole = (f"disk:{tmp_path / name}" for name in ("half", "whole"))
    assert python.run(loop(half, "train(0, 20)"), timeout=240).returncode == 0
    after_half = rows_in(tmp_path / "half")
    again = python.run(loop(half, "train(20, 40)"), timeout=240)
    assert again.returncode == 1
    assert f"already holds {len(after_half)} rows" in again.stderr
    assert rows_in(tmp_path / "half") == after_half
    assert python.run(loop(half, "train(20, 40, resume=True)"), timeout=240).returncode == 0
    assert python.run(loop(whole, "train(0, 40)"), timeout=240).returncode == 0
    assert rows_in(tmp_path / "half") == rows_in(tmp_path / "whole") != after_half


def test_all_stores_of_a_list_get_their_rows(python: Python, tmp_path: Path):
    for store in (f"disk:{tmp_path}/a,disk:{tmp_path}/b*2", f"disk:{tmp_path}/whole"):
        assert python.run(loop(store, "train(0, 20)"), timeout=240).returncode == 0
    assert rows_in(tmp_path / "a") | rows_in(tmp_path / "b") == rows_in(tmp_path / "whole")


def test_an_error_in_the_loop_leaves_the_rows_of_the_last_whole_step(python: Python, tmp_path: Path):
    failed = python.run(loop(f"disk:{tmp_path / 'failed'}", "train(0, 20)", fails=13), timeout=240)
    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, "KeyError: 'in the loop'")
    assert python.run(loop(f"disk:{tmp_path / 'short'}", "train(0, 12)"), timeout=240).returncode == 0
    failed_rows, rows = rows_in(tmp_path / "failed"), rows_in(tmp_path / "short")
    assert rows
    assert failed_rows.items() >= rows.items()  # rows that step 13 made have their initial values


class Two(torch.nn.Module):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        made = {"optimizer": skirl.SGD(lr=0.1), "cache": 50}
        self.one = skirl.EmbeddingBagCollection([skirl.Table("one", 100, 2)], store=f"disk:{folder}/one", **made)
        self.two = skirl.EmbeddingBagCollection([skirl.Table("two", 100, 2)], store=f"disk:{folder}/two", **made)


def fail(model: Two, step: int, body: Callable[[Two, skirl.KeyedJagged], Iterator[None]]) -> list[int]:
    """Train until `body` has yielded in a step, which is where the loop fails. Return how many rows the stores have."""
    ids = skirl.KeyedJagged.one_hot(["one", "two"], torch.arange(10)[:, None].repeat(1, 2))
    with pytest.raises(KeyError), skirl.lookahead([ids] * 4, model, sparse=lambda ids: ids) as batches:
        for batch in batches:
            for _ in body(model, batch):
                if batches.step == step:
                    raise KeyError
    return [len(each.engine.store) for each in (model.one, model.two)]


def both_looked_up(model: Two, batch: skirl.KeyedJagged) -> Iterator[None]:
    one, two = model.one(batch)["one"], model.two(batch)["two"]
    one.sum().backward()
    yield
    two.sum().backward()


def one_after_the_other(model: Two, batch: skirl.KeyedJagged) -> Iterator[None]:
    model.one(batch)["one"].sum().backward()
    yield
    model.two(batch)["two"].sum().backward()


@pytest.mark.parametrize(("body", "step"), [(both_looked_up, 1), (both_looked_up, 3), (one_after_the_other, 3)])
def test_a_step_that_only_some_collections_had_is_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, body: Callable, step: int
):
    assert fail(Two(tmp_path), step, body) == [0, 0]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * (1 if step == 1 else 2)
    assert "not written to disk:" in caplog.text
    assert "only some collections" in caplog.text


def half_frozen(model: Two, batch: skirl.KeyedJagged) -> Iterator[None]:
    model.two.freeze("two")
    (model.one(batch)["one"] * model.two(batch)["two"]).sum().backward()
    yield


def frozen_late(model: Two, batch: skirl.KeyedJagged) -> Iterator[None]:
    (model.one(batch)["one"] * model.two(batch)["two"]).sum().backward()
    yield
    model.two.requires_grad_(False)


def unused(model: Two, batch: skirl.KeyedJagged) -> Iterator[None]:
    one, _ = model.one(batch)["one"], model.two(batch)["two"]
    one.sum().backward()
    yield


def detached(model: Two, batch: skirl.KeyedJagged) -> Iterator[None]:
    (model.one(batch)["one"] * model.two(batch)["two"].detach()).sum().backward()
    yield


@pytest.mark.parametrize(("body", "step"), [(half_frozen, 1), (frozen_late, 2), (unused, 3), (detached, 3)])
def test_collections_that_are_not_trained_keep_no_others_from_being_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, body: Callable, step: int
):
    written = fail(Two(tmp_path), step, body)
    assert (written[0], caplog.text) == (10, "")


def interrupt(*_: object) -> None:
    signal.raise_signal(signal.SIGINT)


def interrupted(folder: Path, then: Callable[[skirl.EmbeddingBagCollection], None]) -> int:
    """Interrupt a loop in its second step, and once more as `then` says. Return how many rows the store has."""
    embeddings = skirl.EmbeddingBagCollection(
        [skirl.Table("a", 100, 2)], optimizer=skirl.SGD(lr=0.1), cache=50, store=f"disk:{folder}"
    )
    ids = skirl.KeyedJagged.one_hot(["a"], torch.arange(10)[:, None])
    with pytest.raises(KeyboardInterrupt), skirl.lookahead([ids] * 3, embeddings, sparse=lambda ids: ids) as batches:
        for batch in batches:
            embeddings(batch)["a"].sum().backward()
            if batches.step == 2:
                then(embeddings)
                interrupt()
    return len(embeddings.engine.store)


def before(owner: object, name: str, patch: pytest.MonkeyPatch) -> None:
    method = getattr(owner, name)
    patch.setattr(owner, name, lambda *given: (interrupt(), method(*given))[1])


def test_a_second_interrupt_while_the_pass_ends_waits_for_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    assert interrupted(tmp_path, lambda one: before(one.engine, "forget_moves", monkeypatch)) == 10
    assert not caplog.records


def test_an_interrupt_while_rows_are_written_gives_them_up_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    assert interrupted(tmp_path, lambda one: before(one.engine.store, "write", monkeypatch)) == 0
    assert "not all in stores on disk: Ctrl-C came" in caplog.text
