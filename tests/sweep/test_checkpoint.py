"""A sweep saved at any step resumes with the bits of one that never stopped, and a variant of it can resume alone."""

import errno
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import skirl
from skirl import Adam
from skirl.checkpoint.rows import FrozenCollection
from skirl.engine.engine import Damaged
from skirl.sweep import checkpoint
from skirl.tools.sealed_json import CheckpointError
from tests.sweep.runs import TABLES, Case, Of, batches_of, make, rows_of

FOUR = (Of(lr=0.3), Of(dropout=0.5, seed=1), Of(rule=Adam(), dim=8, seed=2), Of(seed=3))
CASE = Case(FOUR, steps=10)
NAMES = [f"v{n}" for n in range(4)]


def made(**options: Any) -> skirl.Sweep:
    variants = [skirl.Variant(name, of.overrides) for name, of in zip(NAMES, FOUR, strict=True)]
    return skirl.Sweep(make, options.pop("variants", variants), TABLES, cache=40, **options)


def train(folder: Path, *, save_at: int | None = None, stop: bool = False, resume: bool = False, **options: Any) -> Any:
    """Return each variant's losses by step, and all rows at the end; v3 leaves after step 3."""
    torch.manual_seed(5)
    losses: dict[str, dict[int, float]] = {name: {} for name in NAMES}
    with made(**options, resume=resume) as sweep, skirl.lookahead(batches_of(CASE), sweep) as batches:
        if resume:
            torch.rand(7)
            sweep.load(folder)
        drawn = []
        for batch in batches:
            drawn.append(float(torch.rand(())))
            for name, loss in sweep.step(batch).items():
                losses[name][batches.step] = loss
            if batches.step == 3:
                sweep.drop("v3", "behind")
            if batches.step == save_at:
                sweep.save(folder)
                if stop:
                    return losses, {}, drawn
        batches.close()
        rows = {}
        for variant in sweep:
            rows[variant.name] = rows_of(variant.embeddings)
        return losses, rows, drawn


def goes_on_alone(folder: Path, steps: int) -> list[float]:
    """Go on with a variant alone from its newest checkpoint, and save after each step, as a loop of one's own does."""
    of = FOUR[NAMES.index(folder.name)]
    embeddings = skirl.EmbeddingBagCollection(TABLES, optimizer=skirl.SGD(lr=of.lr), cache=40, seed=of.seed)
    model, dense = make(skirl.Variant(folder.name, of.overrides), embeddings)
    with skirl.lookahead(batches_of(CASE), model) as batches:
        skirl.load(folder, model=model, optimizers=[dense], data=batches)
        losses = []
        for _, batch in zip(range(steps), batches):
            loss = model.loss(batch)
            loss.backward()
            losses.append(loss.item())
            dense.step()
            dense.zero_grad()
            skirl.save(folder, model=model, optimizers=[dense], data=batches)
        return losses


def test_a_variant_that_goes_on_alone_takes_nothing_from_its_sweep_nor_the_sweep_from_it(tmp_path):
    train(tmp_path, save_at=4, stop=True)
    goes_on_alone(tmp_path / "v1", 3)
    held = sorted(tmp_path.rglob("*"))
    says = (
        "variant v1 has gone on alone to step 7, and the sweep would go on from step 4 and remove that: go on alone, or "
        f"keep a copy of {tmp_path / 'v1'} elsewhere and remove checkpoint-000004.json from it"
    )
    with pytest.raises(CheckpointError, match=re.escape(says)):
        train(tmp_path, resume=True)
    assert sorted(tmp_path.rglob("*")) == held
    (tmp_path / "v1" / "checkpoint-000004.json").unlink()
    resumed, *_ = train(tmp_path, resume=True, save_at=6)
    assert resumed["v1"] == {at: loss for at, loss in train(tmp_path / "whole")[0]["v1"].items() if at > 4}
    assert [path.name for path in (tmp_path / "v1").glob("checkpoint-*")] == [
        checkpoint.header_at(tmp_path)["variants"]["v1"]
    ]


def test_rows_that_could_not_be_written_are_in_no_checkpoint(tmp_path, monkeypatch):
    """A second try would write only what the first one had left."""
    write, tries = FrozenCollection.write, []

    def fails_once(self: FrozenCollection) -> Any:
        tries.append(1)
        if len(tries) == 2:
            raise OSError(errno.ENOSPC, "no room")
        return write(self)

    monkeypatch.setattr(FrozenCollection, "write", fails_once)
    with made() as sweep, skirl.lookahead(batches_of(CASE), sweep) as batches:
        for batch in batches:
            sweep.step(batch)
            if batches.step == 2:
                sweep.save(tmp_path)
            if batches.step == 4:
                with pytest.raises(OSError, match="got no new checkpoint"):
                    sweep.save(tmp_path)
                assert {len([*(tmp_path / name).glob("checkpoint-*")]) for name in NAMES} == {1}
                break


def test_a_load_that_fails_leaves_no_sweep_that_trains(tmp_path):
    train(tmp_path, save_at=2, stop=True)
    next((tmp_path / "v2").glob("dense-*/model.safetensors")).write_bytes(b"")
    with made() as sweep, skirl.lookahead(batches_of(CASE), sweep) as batches:
        with pytest.raises(CheckpointError):
            sweep.load(tmp_path)
        with pytest.raises(Damaged, match="was loaded only in part"):
            next(iter(batches))
        sweep.engine.damage = None  # so that it closes


def test_only_the_folders_of_a_sweep_are_removed(tmp_path):
    (tmp_path / "rows" / "2024").mkdir(parents=True)
    (tmp_path / "rows" / "sweep-3").mkdir()
    with pytest.raises(ValueError, match=r"sweep-3 already holds rows of a sweep: go on with it by --resume"):
        made(store=f"disk:{tmp_path / 'rows'}")
    made(store=f"disk:{tmp_path / 'rows'}", resume=True).close()
    assert {path.name for path in (tmp_path / "rows").iterdir()} == {"2024", "sweep-0"}


def test_the_checkpoint_of_another_sweep_is_refused(tmp_path):
    train(tmp_path, save_at=2, stop=True)
    other = [skirl.Variant("v0", FOUR[0].overrides), skirl.Variant("w", FOUR[1].overrides)]
    with made(variants=other) as sweep:
        with pytest.raises(CheckpointError, match=r"is of another sweep: it has variant 'v1'\. Make the sweep of the"):
            sweep.load(tmp_path)
        with pytest.raises(
            CheckpointError, match=re.escape("holds no checkpoint of a sweep: give a folder that sweep.save")
        ):
            sweep.load(tmp_path / "v0")
