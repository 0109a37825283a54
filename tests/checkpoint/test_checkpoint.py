"""A run that is saved, killed, loaded and trained further has the bits of a run that never stopped."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import skirl
from skirl.checkpoint.folder import header, numbers
from skirl.tools import rng_state
from skirl.tools.sealed_json import CheckpointError, seal
from tests.cases import cases, some
from tests.killed import ENDLESS
from tests.resume import DENSE, ROWS, Run, Setup, assert_same
from tests.warm import Python

HEADER = header(Path(), 1).name

SETUPS = [
    Setup(ROWS[1], "adagrad", "list", accumulate=3, depth="epoch"),
    Setup(ROWS[0], "momentum", "synthetic", depth=1),
    Setup(ROWS[3], "adam", "synthetic", depth="epoch", cache="20%"),
    Setup(ROWS[2], "adamw", "shuffled", depth=4, prefetch=0),
    Setup(ROWS[3], "adam", "synthetic", accumulate=3, depth="auto"),
    Setup(ROWS[2], "adam", "list", passes=3, batches=4, early=True),
    Setup(ROWS[3], "momentum", "turning", passes=3, batches=4),
    Setup(ROWS[0], "adagrad", "synthetic", early=True),
]


@pytest.mark.parametrize("setup", some(SETUPS), ids=str)
def test_resumed_after_any_step(setup: Setup, tmp_path: Path) -> None:
    """Save after every step, in mid-pass and at a pass's end. The saving run itself is not disturbed."""
    whole = Run(setup).train()
    saving = Run(setup).train(saved=lambda step: tmp_path / str(step))
    assert_same(saving, whole)
    folders = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert len(folders) == setup.steps - setup.early
    for folder in some(folders):
        resumed = Run(setup).load(folder)
        assert resumed.batches.step == int(folder.name)
        assert_same(resumed.train(), whole)
    counters = saving.model.rows.engine.counters
    assert counters.written and counters.fetched, "the cache must be too small for all rows"


@st.composite
def setups(draw: Any) -> Setup:
    return Setup(
        draw(st.sampled_from(ROWS)),
        draw(st.sampled_from(sorted(DENSE))),
        draw(st.sampled_from(["synthetic", "list", "shuffled"])),
        batches=draw(st.integers(1, 9)),
        passes=draw(st.integers(1, 3)),
        accumulate=draw(st.integers(1, 3)),
        depth=draw(st.sampled_from([1, 3, 50, "auto", "epoch"])),
        prefetch=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 1000)),
        early=draw(st.booleans()),
        cache=200,
    )


@cases(20)
@given(setups(), st.data())
def test_a_resumed_run_resumed_again(tmp_path_factory: pytest.TempPathFactory, setup: Setup, data: Any) -> None:
    """Two stops, each followed by a process with a different cache and window."""
    whole = Run(setup).train()
    stops = sorted(data.draw(st.lists(st.integers(1, setup.steps), min_size=1, max_size=3, unique=True)))
    folder = tmp_path_factory.mktemp("resumed") / "checkpoint"
    run, done = Run(setup), []
    for stop in stops:
        run.train(until=stop)
        done += run.losses
        run.save(folder)  # after the with-block, or after the break out of it
        changed = replace(
            setup,
            depth=data.draw(st.sampled_from([1, 3, "auto", "epoch"])),
            cache=data.draw(st.sampled_from([200, 400])),
        )
        run = Run(changed).load(folder)
    assert_same(run.train(), whole)
    assert done + run.losses == whole.losses


def test_interrupted_before_the_backward(tmp_path: Path) -> None:
    """A step cut short by an exception never happened: the resumed run yields its batch again."""
    setup = Setup(dense="momentum")
    run = Run(setup)
    with pytest.raises(KeyboardInterrupt), run.batches as batches:
        for batch in batches:
            before = rng_state.capture()
            loss = run.model.loss(batch)
            if batches.step == 4:
                raise KeyboardInterrupt
            loss.backward()
            run.dense.step(), run.dense.zero_grad()
            for schedule in run.schedules:
                schedule.step()
    run.save(tmp_path)
    resumed = Run(setup).load(tmp_path)
    assert resumed.begun == 3
    rng_state.restore(before)  # dropout has already drawn for the step that never happened
    assert resumed.train().losses == Run(setup).train().losses[3:]


def test_a_pass_begun_anew_in_a_resumed_run(tmp_path: Path) -> None:
    """After a break, a loop begins with the loader's first batch, resumed or not."""
    setup = Setup(loader="list")
    first = setup.data.batch(0)
    Run(setup).train(until=5).save(tmp_path)
    run = Run(setup).load(tmp_path)
    with run.batches as batches:
        assert torch.equal(next(iter(batches)).labels, setup.data.batch(5).labels)
        assert torch.equal(next(iter(batches)).labels, first.labels)
        run.model.loss(first).backward()
        assert batches.state_dict()["batches"] == 1


def test_without_a_lookahead(tmp_path: Path) -> None:
    setup = Setup()
    batches = list(setup.data)

    def trained(run: Run, part: list[skirl.Batch]) -> list[float]:
        losses = []
        for batch in part:
            loss = run.model.loss(batch)
            loss.backward()
            run.dense.step(), run.dense.zero_grad()
            losses.append(loss.item())
        return losses

    run = Run(setup)
    trained(run, batches[:3])
    skirl.save(tmp_path, model=run.model, optimizers=[run.dense])
    expected = trained(run, batches[3:])
    again = Run(setup)
    trained(again, batches[4:6])
    skirl.load(tmp_path, model=again.model, optimizers=[again.dense])
    assert trained(again, batches[3:]) == expected
    skirl.load(tmp_path, model=again.model, optimizers=[again.dense])  # back into a model with a warm cache
    assert trained(again, batches[3:]) == expected
    assert again.model.rows.engine.counters.fetched
    with pytest.raises(CheckpointError, match="saved without data"):
        skirl.load(tmp_path, model=again.model, data=again.batches)


def test_gradients_that_wait_for_a_dense_step_are_saved(tmp_path: Path) -> None:
    run = Run(Setup())
    run.model.loss(run.setup.data.batch(0)).backward()
    skirl.save(tmp_path, model=run.model)
    other = Run(Setup())
    skirl.load(tmp_path, model=other.model)
    grads = [[p.grad for p in model.parameters() if p.numel()] for model in (run.model, other.model)]
    assert grads[0] and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))  # type: ignore[arg-type]
    run.dense.zero_grad()
    skirl.save(tmp_path, model=run.model)
    skirl.load(tmp_path, model=other.model)
    assert all(p.grad is None for p in other.model.parameters())


def test_a_save_in_the_middle_of_a_step_is_refused(tmp_path: Path) -> None:
    run = Run(Setup(accumulate=3))
    with run.batches as batches:
        for batch in batches:
            run.model.loss(batch).backward()
            if not batches.ends_step:
                with pytest.raises(RuntimeError, match=r"micro-batch [12] of 3 .* save when batches.ends_step"):
                    run.save(tmp_path)
                continue
            run.save(tmp_path)
            break
    assert run.model.rows.engine.packs[0].steps.tolist() == [1] * 6


def test_partial_gradients_count_as_at_the_next_batch(tmp_path: Path) -> None:
    """If the last micro-batch of a step has no backward, a save applies the gradients of the others, as the loop would."""

    def trained(save: bool) -> Run:
        run = Run(Setup(accumulate=2))
        with run.batches as batches:
            for i, batch in enumerate(batches):
                loss = run.model.loss(batch)
                if i % 2 == 0:
                    loss.backward()
                elif save:
                    run.save(tmp_path)
        run.drawn = None
        return run

    assert_same(trained(True), trained(False))


def test_loading_while_iterating_is_refused(tmp_path: Path) -> None:
    run = Run(Setup()).train(until=3)
    run.save(tmp_path)
    other = Run(Setup())
    with other.batches as batches:
        next(iter(batches))
        with pytest.raises(RuntimeError, match="already iterating"):
            other.load(tmp_path)
    other.batches = other.lookahead()
    assert_same(other.load(tmp_path).train(), Run(Setup()).train())


def test_a_damaged_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    run = Run(Setup()).train(until=3)
    run.save(tmp_path)
    engine = run.model.rows.engine
    engine.damage = "rows of step 4 were lost"
    with pytest.raises(RuntimeError, match="rows of step 4"):
        run.save(tmp_path)
    run.batches = run.lookahead()
    run.load(tmp_path).losses.clear()
    assert_same(run.train(), Run(Setup()).train())


# Refusals.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    Run(Setup()).train(until=5).save(folder)
    return folder


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("start-"))


def refused(folder: Path, words: str, run: Run | None = None) -> None:
    """Assert that loading fails with these words and leaves the run unchanged."""
    run = run or Run(Setup()).train(until=2)
    before = run.bits()
    with pytest.raises(CheckpointError, match=words):
        run.load(folder)
    assert run.bits() == before
    run.model.rows.engine.check()


def test_nothing_is_unpickled(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("unpickled")

    run = Run(Setup())
    for name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"):
        monkeypatch.setattr(name, never)
    run.load(saved)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_anywhere_is_refused_by_name(saved: Path, tmp_path: Path, damage: str, campaign_seed: int) -> None:
    rng = np.random.default_rng([campaign_seed, len(damage)])
    run = Run(Setup()).train(until=2)
    for original in files(saved):
        folder = tmp_path / "copy"
        shutil.copytree(saved, folder)
        path = folder / original.relative_to(saved)
        raw = bytearray(path.read_bytes())
        if damage == "flip":
            raw[rng.integers(len(raw))] ^= 1 << int(rng.integers(8))
        elif damage == "cut":
            del raw[rng.integers(len(raw)) :]
        path.write_bytes(raw)
        if damage == "remove":
            path.unlink()
        gone = damage == "remove" and path.name == HEADER
        refused(folder, "copy holds no checkpoint" if gone else path.name.replace(".", r"\."), run)
        shutil.rmtree(folder)


def test_a_damaged_cache_of_one_collection_leaves_the_others_alone(tmp_path: Path) -> None:
    def made() -> nn.ModuleDict:
        tables = {name: skirl.Table(name, 100, 2) for name in "ab"}
        return nn.ModuleDict(
            {name: skirl.EmbeddingBagCollection([t], optimizer=skirl.SGD(), cache=8) for name, t in tables.items()}
        )

    def step(model: nn.ModuleDict) -> None:
        for name, rows in model.items():
            rows(skirl.KeyedJagged.one_hot([name], torch.tensor([[1], [2]])))[name].sum().backward()

    model = made()
    step(model)
    skirl.save(tmp_path, model=model)
    parts = json.loads((tmp_path / HEADER).read_text())["parts"][0]["rows"]
    [segment] = parts["b"]["cache"]["segments"]
    path = tmp_path / "rows" / f"{segment.split()[0]}.rows"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    other = made()
    with pytest.raises(CheckpointError, match=path.name):
        skirl.load(tmp_path, model=other)
    step(other)


def test_foreign_files_are_refused(saved: Path, tmp_path: Path) -> None:
    run = Run(Setup()).train(until=2)
    refused(tmp_path / "nowhere", "nowhere holds no checkpoint", run)
    for text in (b"", b"{}", b"[]", b"\x80\x04pickle", seal({"format": "other", "format_version": 1}), b"[" * 100_000):
        (tmp_path / HEADER).write_bytes(text)
        refused(tmp_path, "is damaged, or not a checkpoint of skirl", run)
    body = json.loads((saved / HEADER).read_text())
    del body["~sha256"]
    [part] = body["parts"]
    cache = part["rows"]["rows"]["cache"]
    outside = cache | {"segments": ["../x" + cache["segments"][0][16:]]}
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    for changes, words in (
        ({"format_version": 99, "skirl": "9.9"}, "written by skirl 9.9 in format 99"),
        ({"dense": body["dense"] | {"file": "../secret/x"}}, "outside its folder"),
        ({"parts": [part | {"rows": {"rows": part["rows"]["rows"] | {"cache": outside}}}]}, "is not a segment"),
    ):
        (copy / HEADER).write_bytes(seal(body | changes))
        refused(copy, words, run)
    (copy / HEADER).write_bytes(seal(body))
    run.batches = run.lookahead()
    run.load(copy)


def collection(kind: Any = skirl.EmbeddingBagCollection, optimizer: Any = None, **of_table: Any) -> nn.Module:
    tables = [skirl.Table("a", 50, 2), replace(skirl.Table("b", 60, 4, features=("b1", "b2")), **of_table)]
    return kind(tables, optimizer=optimizer or skirl.Adam(lr=0.1), cache=10, seed=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": 61}, "table 'b'.rows = 60, here it is 61"),
        ({"init": skirl.Normal(0.1)}, "table 'b'.init = 'Uniform', here it is 'Normal'"),
        ({"optimizer": {"b": skirl.Adam(eps=0.1), "*": skirl.Adam()}}, r"'a'.pattern = '\*'|'b'.optimizer.eps"),
        ({"kind": skirl.EmbeddingCollection}, "= 'EmbeddingBagCollection', here it is 'EmbeddingCollection'"),
    ],
)
def test_another_definition_is_refused_by_field(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    skirl.save(tmp_path, model=collection())
    with pytest.raises(CheckpointError, match=words):
        skirl.load(tmp_path, model=collection(**changes))
    skirl.load(tmp_path, model=collection(optimizer=skirl.Adam(lr=0.5)))  # the learning rate is state


def test_other_tables_optimizers_and_parameters_are_refused(saved: Path) -> None:
    run = Run(Setup())
    parts = run.parts

    def load(words: str, kind: type[Exception] = CheckpointError, **changes: Any) -> None:
        with pytest.raises(kind, match=words):
            skirl.load(saved, **({"model": run.model, "optimizers": parts, "data": run.batches} | changes))

    load(r"has optimizers\[2\], unlike this model", optimizers=parts[:2])
    sgd = torch.optim.SGD(run.model.parameters())
    load(r"optimizers\[0\] = 'Adam', here it is 'SGD'", optimizers=[sgd, *parts[1:]])
    backwards = torch.optim.Adam(list(run.model.parameters())[::-1])
    load(r"was saved with optimizers\[0\].parameters = ", optimizers=[backwards, *parts[1:]])
    twice = skirl.lookahead([], run.model, accumulate=2)
    load("saved with accumulate=1: set it to that, not 2", ValueError, data=twice)
    load("lookahead over another model", data=Run(Setup()).batches)
    wider = Run(Setup())
    for layer, words in (
        (nn.Linear(57, 6), r"top\.1\.weight = '\[5, 57\] torch.float32', here it is '\[6, 57\]"),
        (nn.Linear(57, 5, bias=False), "json has top.1.bias, unlike this model: make all"),
    ):
        wider.model.top[1] = layer
        load(words, model=wider.model, optimizers=(), data=None)
    skirl.load(saved, model=run.model, optimizers=parts, data=run.batches)


def test_what_cannot_be_saved_is_named_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"deep": [1, {"here": object()}]}

        def load_state_dict(self, state: Any) -> None: ...

    run = Run(Setup()).train(until=2)
    run.save(tmp_path)
    before = files(tmp_path)
    with pytest.raises(TypeError, match=r"run\.optimizers\.0\.state\.deep\.1\.here is of type builtins\.object"):
        skirl.save(tmp_path, model=run.model, optimizers=[Odd()])
    assert files(tmp_path) == before


# All or nothing.


def test_one_folder_holds_one_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes-0123456789abcdef").mkdir()
    (tmp_path / "dense-mine").write_bytes(b"mine")
    stale = tmp_path / "rows" / "0123456789abcdef.rows.tmp"
    stale.parent.mkdir()
    stale.write_bytes(b"cut short by a kill")
    run = Run(Setup()).train(until=3, saved=lambda step: tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 6 and not stale.exists()
    assert {"checkpoint-000003.json", "start-000001", "notes-0123456789abcdef", "dense-mine", "rows"} <= set(names)
    assert run.model.rows.engine.store.generation == 3


@pytest.mark.parametrize("failing", ["os.fsync", "os.replace", "os.pwrite", "pathlib.Path.open"])
def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call in turn fails, as on a full disk. The next save works."""
    run = Run(Setup()).train(until=2)
    run.save(tmp_path)
    real = {"os.fsync": os.fsync, "os.replace": os.replace, "os.pwrite": os.pwrite}.get(failing, Path.open)
    for n in range(1, 100):
        left = n

        def broken(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        old = numbers(tmp_path)
        before = files(tmp_path)
        monkeypatch.setattr(failing, broken)
        try:
            run.save(tmp_path)
        except OSError:
            monkeypatch.setattr(failing, real)
            if numbers(tmp_path) == old:
                assert files(tmp_path) == before
            skirl.load(tmp_path, model=Run(Setup()).model)
        else:
            monkeypatch.setattr(failing, real)
            assert n > 1
            break
    assert_same(Run(Setup()).load(tmp_path).train(), Run(Setup()).train())


def test_killed_at_every_touch_of_a_file(python: Python, tmp_path: Path) -> None:
    """At each point, either the old checkpoint is there whole, or the new one."""
    moments = map(str, some(range(0, 200, 2)))
    done = python.run("from tests.killed import main; main()", str(tmp_path), *moments, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert len(lines) > 5
    assert lines[0][1:] == [0, 0, 2]
    for _, status, before, after in lines[1:-1]:
        assert status == -signal.SIGKILL and after in (before, before + 2)
    kept = [before == after for _, _, before, after in lines[1:]]
    assert kept == sorted(kept, reverse=True) and any(kept), "the new one appears at one moment, and stays"
    assert lines[-1][1] == 0
    run = Run(ENDLESS).load(tmp_path)
    run.train(until=run.begun + 5)
    assert_same(run, Run(ENDLESS).train(until=run.begun + 5))
