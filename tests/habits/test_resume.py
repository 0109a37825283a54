"""Runs resumed with other flags, from the best checkpoint, or as the start of another run; losses that are not numbers."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import skirl
import skirl.train.loop as loop
from skirl.checkpoint import folder, numbers
from skirl.cli import main
from skirl.cli.train import Train
from skirl.store.disk.os_files import DiskError, Lock
from skirl.train.recipe import Recipe
from skirl.train.resume import told
from tests.resume import learned
from tests.warm import COMMAND, Python

SMALL: dict[str, Any] = {
    "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 32, "steps": 20, "cache": "300", "threads": 1,
    "quiet": True,
}  # fmt: skip
JUDGED: dict[str, Any] = {**SMALL, "valid": "20%", "eval_every": 4}


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> Path:
    saved = tmp_path_factory.mktemp("halfway") / "saved"
    Train.of(**{**SMALL, "steps": 10}, save=saved).run()
    return saved


@pytest.fixture
def saved(halfway: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(halfway, tmp_path / "saved"))


def test_a_run_that_was_refused_does_not_stand_in_the_way_of_the_corrected_one(tmp_path: Path, python: Python):
    store = "disk:rows"
    run = "train --data synthetic:tiny --model dlrm-tiny --batch 32 --steps 2 --save saved --run run --quiet --store"
    refused = python.run(COMMAND, *run.split(), store, "--dim", "4", "--cache", "20", cwd=tmp_path)
    assert refused.returncode == 1
    assert "set --cache to" in refused.stderr
    assert not numbers(tmp_path / "saved")
    done = python.run(COMMAND, *run.split(), store, "--dim", "8", "--cache", "300", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path / "saved") == [1, 2]


def by_hand(
    flags: dict[str, Any],
    rates: dict[int, tuple[float, float]] | None = None,
    begin: Callable[[nn.Module], object] = lambda model: None,
) -> list[float]:
    """Return the losses of a plain torch loop over the run's model, which sets rates before some steps."""
    recipe = Recipe.of(**{name: value for name, value in flags.items() if name != "quiet"})
    recipe.use_threads()
    embeddings = recipe.embeddings(300)
    model, dense = recipe.model_over(embeddings)
    begin(model)
    losses = []
    with skirl.lookahead(recipe.stream(), model) as batches:
        for batch in batches:
            if rates and batches.step in rates:
                rows, weights = rates[batches.step]
                embeddings.optimizer.param_groups[0]["lr"], dense.param_groups[0]["lr"] = rows, weights
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
            dense.zero_grad()
            loss.backward()
            dense.step()
            losses.append(loss.item())
    return losses


def losses_of(monkeypatch: pytest.MonkeyPatch, command: Train) -> tuple[list[float], dict[str, Any]]:
    found: list[float] = []
    real = loop.steps

    def steps(*args: Any) -> Iterator[Any]:
        for done in real(*args):
            found.append(done.loss)
            yield done

    with monkeypatch.context() as patch:
        patch.setattr(loop, "steps", steps)
        result = command.run()
    return found, result


# Other flags.


def test_another_learning_rate_holds_from_the_step_where_the_run_goes_on(saved, tmp_path, monkeypatch, caplog):
    run = tmp_path / "run"
    command = Train.of(**SMALL, save=saved, resume=True, lr=0.5, dense_lr=0.03, run=str(run))
    found, result = losses_of(monkeypatch, command)
    assert found == by_hand(SMALL, {11: (0.5, 0.03)})[10:]
    assert found != by_hand(SMALL)[10:]
    said = ["--lr is 0.5 from step 10 on, it was 0.02", "--dense-lr is 0.03 from step 10 on, it was 0.001"]
    assert [record.getMessage() for record in caplog.records] == said
    assert command.summary(result)["changed"].splitlines() == ["--steps is 20 from step 10 on, it was 10", *said]
    config = json.loads((run / "config.json").read_text())
    assert config["flags"]["lr"] == 0.5 and told(config["changes"]) == command.summary(result)["changed"].splitlines()
    # The second time there is nothing new, and earlier changes are still known.
    again = Train.of(**{**SMALL, "steps": 22}, save=saved, resume=True, lr=0.5, dense_lr=0.03, run=str(run)).run()
    assert told(again["changes"]) == ["--steps is 22 from step 20 on, it was 20"]
    kept = json.loads((run / "config.json").read_text())["changes"]
    assert [(change["flag"], change["step"]) for change in kept] == [
        ("steps", 10), ("lr", 10), ("dense_lr", 10), ("steps", 20),
    ]  # fmt: skip
    assert main(["report", str(run)]) == 0


def test_another_learning_rate_under_a_schedule(tmp_path, monkeypatch):
    flags = {**SMALL, "schedule": "linear", "warmup": 4}

    def stop(*args: Any) -> Iterator[Any]:
        for number, done in enumerate(real(*args), start=1):
            yield done
            if number == 12:
                raise ZeroDivisionError

    real = loop.steps
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(loop, "steps", stop)
        Train.of(**flags, save=tmp_path, save_every=10).run()
    found, result = losses_of(monkeypatch, Train.of(**flags, save=tmp_path, resume=True, lr=0.5))
    factors = {step: min(step / 4, (20 - (step - 1)) / 16) for step in range(1, 21)}
    rates = {step: ((0.02 if step <= 10 else 0.5) * factor, 0.001 * factor) for step, factor in factors.items()}
    assert found == pytest.approx(by_hand(SMALL, rates)[10:], rel=1e-6)
    assert result["begun_at"] == 10


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"optimizer": "adam"}, "--optimizer is adam, the run was saved with rowwise-adagrad"),
        ({"top": (8, 4)}, "--top is 8 4, the run was saved with not set"),
        ({"dim": 8, "batch": 64}, "--batch is 64, the run was saved with 32; --dim is 8, the run was saved with 4"),
    ],
)
def test_a_flag_that_may_not_change_is_named_with_both_values(flags, said, halfway):
    then = ": set it to that to go on, or begin a new run with another --save (and --from, to take rows along)"
    with pytest.raises(ValueError) as caught:
        Train.of(**{**SMALL, **flags}, save=halfway, resume=True).run()
    assert str(caught.value) == said + then


def test_a_second_run_on_a_folder_that_another_saves_to_is_refused(tmp_path):
    held = Lock(tmp_path)
    with pytest.raises(DiskError, match=rf"in use by process {os.getpid()} on "):
        Train.of(**JUDGED | {"steps": 1}, save=tmp_path, resume=True, run="none").run()
    held.release()


# The best checkpoint.


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Train]:
    """A run whose held-out loss first falls and then rises: its dense learning rate is far too high."""
    saved = tmp_path_factory.mktemp("judged") / "saved"
    command = Train.of(**{**JUDGED, "dense_lr": 0.2, "steps": 28}, save=saved, keep_last=1, keep_best=True,
                       run=str(saved.parent / "run"))  # fmt: skip
    return saved, command.run(), command


def test_the_best_checkpoint_is_kept_beside_the_last(judged, monkeypatch):
    saved, result, command = judged
    evals = [line for line in skirl.lines_of(saved.parent / "run") if line["kind"] == "eval"]
    loss, step = min((line["test_logloss"], line["step"]) for line in evals)
    assert 4 < step < 28, "the best is neither the first nor the last"
    assert result["best"] == {"folder": str(saved / "best"), "step": step, "test_logloss": loss}
    said = f"step {step}, log loss {loss:.4f}, kept in {saved / 'best'}"
    assert command.summary(result)["best"] == said
    assert len(numbers(saved)) == len(numbers(saved / "best")) == 1
    # It has the bits of a run that ended there.
    plain = Train.of(
        **{**JUDGED, "dense_lr": 0.2, "steps": 28}, save=saved.parent / "plain", save_every=step, keep_last=9
    ).run()
    assert plain["loss"] == result["loss"]
    at = dict(folder.headers_with_steps(saved.parent / "plain"))
    assert learned(saved / "best") == learned(at[step])


def test_the_best_is_exported_and_gone_on_from(judged, tmp_path, capsys):
    saved, result, _ = judged
    assert main(["export", str(saved / "best"), "--out", str(tmp_path / "rows.safetensors")]) == 0
    copy = Path(shutil.copytree(saved / "best", tmp_path / "copy"))
    flags = {**JUDGED, "dense_lr": 0.2, "steps": 28}
    resumed = Train.of(**flags, save=copy, resume=True).run()
    assert resumed["begun_at"] == result["best"]["step"] and resumed["loss"] == result["loss"]
    assert main(["report", str(saved.parent / "run")]) == 0
    assert f"kept in {saved / 'best'}" in capsys.readouterr().out


class Killed(BaseException):
    """Raised in place of a system call: the process is as good as dead."""


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_killed_at_any_moment_the_old_best_is_whole_or_the_new_one(store, tmp_path, monkeypatch):
    def made(name: str) -> Any:
        return skirl.EmbeddingBagCollection(
            [skirl.Table("a", 100, 2)], optimizer=skirl.SGD(lr=0.1), cache=4,
            store="memory" if store == "memory" else f"disk:{tmp_path / name}",
        )  # fmt: skip

    def train(rows: Any, first: int) -> None:
        for i in range(first, first + 10):
            rows(skirl.KeyedJagged.one_hot(["a"], torch.tensor([[i], [i + 1]])))["a"].sum().backward()

    rows, saved, kept = made("rows"), tmp_path / "saved", []
    for first in (0, 20):
        train(rows, first)
        header = skirl.save(saved, model=rows, keep_last=2).path
        if not kept:
            folder.keep_best(header)
        kept.append(header)
    values = [learned(path) for path in kept]
    calls, limit = 0, 0

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > limit:
                raise Killed
            return real(*args, **kwargs)

        return call

    found = []
    for limit in range(200):  # noqa: B007 - killed before the next call of the system, until it is through
        copy = Path(shutil.copytree(saved, tmp_path / "copy"))
        calls, through = 0, True
        with monkeypatch.context() as patch:
            for name in ("link", "mkdir", "replace", "fsync", "unlink", "open", "rmdir"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                folder.keep_best(copy / kept[1].name)
            except Killed:
                through = False
        found.append(values.index(learned(copy / "best")))
        shutil.rmtree(copy)
        if through:
            break
    assert found == sorted(found) and found[0] == 0 and found[-1] == 1 and len(found) > 8
    rows.close()


def test_a_best_that_cannot_be_kept_is_told_and_the_old_one_stays(tmp_path, monkeypatch, caplog):
    real, calls = folder.keep_best, []

    def keep(header: Path) -> Path:
        calls.append(header)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(header)

    monkeypatch.setattr(folder, "keep_best", keep)
    result = Train.of(**{**JUDGED, "steps": 12}, save=tmp_path / "saved", keep_best=True).run()
    assert len(calls) == 3 and result["best"]["step"] == 4 and result["best"]["test_logloss"] is None
    assert result["failed"].startswith(
        f"step 12 is the best so far, but it could not be kept in {tmp_path / 'saved' / 'best'}"
    )
    assert "that of step 4 stays" in result["failed"] and "that of step 4 stays" in caplog.text


def test_the_best_of_another_run_is_not_written_over(judged, tmp_path):
    saved, *_ = judged
    shutil.copytree(saved / "best", tmp_path / "saved" / "best")
    with pytest.raises(ValueError, match="best holds the checkpoints of a run: add --resume"):
        Train.of(**JUDGED, save=tmp_path / "saved", keep_best=True).run()


# Fine-tuning.


def test_a_new_run_from_another_runs_rows_and_weights(halfway, tmp_path, monkeypatch):
    """As by hand in plain PyTorch: the same weights, another data seed, and a fresh optimizer for the dense part."""
    flags = {**SMALL, "steps": 6, "seed": 3, "lr": 0.3}
    command = Train.of(**flags, from_=halfway, save=tmp_path / "tuned")
    found, result = losses_of(monkeypatch, command)
    assert result["begun_at"] == 0 and result["steps"] == 6

    def begin(model: nn.Module) -> None:
        skirl.import_rows(model, halfway)
        state = torch.load(exported(halfway, tmp_path), weights_only=True)
        named = dict(model.named_parameters())
        model.load_state_dict({name: state[name] for name in named if name in state}, strict=False)
        assert len(named.keys() & state.keys()) > 5

    assert found == by_hand(flags, begin=begin)
    rows = result["from"]["rows"]
    said = f"with {rows:,} rows out of {halfway}, with their optimizer's state"
    assert command.summary(result)["begun"] == said and rows > 0
    # When killed, it resumes like any other run.
    more = Train.of(**{**flags, "steps": 8}, save=tmp_path / "tuned", resume=True).run()
    assert more["begun_at"] == 6


def exported(path: Path, out: Path) -> Path:
    file = out / "dense.pt"
    assert main(["export", str(path), "--out", str(file), "--dense"]) == 0
    return file


def test_rows_come_without_the_state_of_another_optimizer(halfway):
    result = Train.of(**{**SMALL, "steps": 3}, from_=halfway, optimizer="adam").run()
    assert result["from"]["row_state"] is False
    assert "whose optimizer's state starts from zero" in Train.of(**SMALL).summary(result)["begun"]


def test_rows_alone_leave_the_dense_weights_as_they_begin(halfway, tmp_path, caplog):
    assert main(["export", str(halfway), "--out", str(tmp_path / "rows.safetensors")]) == 0
    assert main(["import", str(tmp_path / "rows.safetensors"), "--out", str(tmp_path / "imported")]) == 0
    result = Train.of(**{**SMALL, "steps": 3}, from_=tmp_path / "imported").run()
    assert result["from"]["dense"] is False and "has rows and no dense weights" in caplog.text


def test_what_does_not_fit_is_refused_by_flag(halfway):
    then = f"its weights fit no other model, so set what {halfway} has"
    for flags, said in (
        ({"dim": 8}, f"--dim is 8, the run was saved with 4: {then}"),
        ({"model": "dcnv2-tiny"}, f"--model is dcnv2-tiny, the run was saved with dlrm-tiny: {then}"),
        ({"rows_scale": 2.0}, r"table '\w+' has [\d,]+ rows by --data and --rows, and [\d,]+ in "),
        ({"data": "synthetic:avazu"}, r"--data has a table '\w+' and .* has none: give data with the same tables"),
    ):
        with pytest.raises(ValueError, match=said):
            Train.of(**{**SMALL, **flags}, from_=halfway).run()


def test_ids_that_would_become_other_rows_are_refused(tmp_path):
    schema = tmp_path / "schema.toml"
    schema.write_text('[[label]]\nname = "y"\n[[id]]\nname = "item"\ntype = "int"\nrows = 500\n')
    data = tmp_path / "clicks.csv"
    data.write_text("y,item\n" + "".join(f"{i % 2},{i % 37}\n" for i in range(400)))
    read = {**SMALL, "data": f"csv:{data}", "schema": str(schema), "steps": 5, "model": "deepfm-tiny"}
    Train.of(**read, save=tmp_path / "hashed").run()
    tuned = Train.of(**read, from_=tmp_path / "hashed").run()
    assert 30 < tuned["from"]["rows"] <= 37
    with pytest.raises(ValueError, match=r"--vocab open numbers rows as ids arrive, .* other rows than in .*hashed:"):
        Train.of(**read, vocab="open", from_=tmp_path / "hashed").run()


# Loss that is not a number.


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_step(tmp_path, caplog, capsys):
    flags = {**SMALL, "lr": 0.5, "dense_lr": 1e18}
    result = Train.of(
        **flags, save=tmp_path / "saved", save_every=1, keep_last=9, run=str(tmp_path / "run"), log_every=1
    ).run()
    step = result["steps"]
    assert 1 < step < 20 and not result["stopped_early"]
    assert result["failed"].startswith(("the loss is ", "predictions are not finite"))
    assert f" at step {step}, for the first time, so training stopped there" in result["failed"]
    assert "set --lr and --dense-lr lower, or --warmup higher, and start over" in result["failed"]
    # The step itself is not saved. The checkpoint before it led to that loss, so it is named as useless too.
    steps = [at for at, _ in folder.headers_with_steps(tmp_path / "saved")]
    assert steps == list(range(step - 1, -1, -1))
    broken = folder.header(tmp_path / "saved", numbers(tmp_path / "saved")[-1])
    if step > 1:
        assert (
            f"or go on from step {step - 2} in {tmp_path / 'saved'} with --resume once {broken} is removed"
            in result["failed"]
        )
    # Everything logged until then is a number, and the report says how the run ended.
    assert all(np.isfinite(line["loss"]) for line in skirl.lines_of(tmp_path / "run"))
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "failed" in capsys.readouterr().out


def test_held_out_predictions_that_are_no_numbers_name_the_step(monkeypatch, tmp_path):
    real = loop.Evaluation.run

    def run(judge: Any, step: int, model: Any, batches: Any) -> Any:
        if step == 8:
            with torch.no_grad():
                next(p for n, p in model.named_parameters() if n.startswith("top")).fill_(float("nan"))
        return real(judge, step, model, batches)

    monkeypatch.setattr(loop.Evaluation, "run", run)
    result = Train.of(**JUDGED, save=tmp_path, save_every=4).run()
    said = (
        "predictions for the samples held out are not finite at step 8, for the first time, so training stopped there"
    )
    assert result["failed"].startswith(said) and "or go on from step 4 in" in result["failed"]
