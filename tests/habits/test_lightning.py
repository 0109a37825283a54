"""Habits of Lightning users, compared with a Lightning run that uses nn.EmbeddingBag and its plain loader."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import skirl

lightning = pytest.importorskip("lightning", reason="the adapter is for Lightning")
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

from skirl import CheckpointError  # noqa: E402
from skirl.lightning import Rows  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
]
ADAGRAD = skirl.Adagrad(lr=0.1)
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-13}


def sparse_of(batch: list[Tensor]) -> skirl.KeyedJagged:
    ids = batch[0]
    return skirl.KeyedJagged(["a"], ids.reshape(-1), lengths=torch.full((len(ids),), 2))


class Bag(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag.from_pretrained(weight.clone(), freeze=False, mode="sum")

    def forward(self, batch: list[Tensor]) -> Tensor:
        return self.bag(batch[0])


class Ours(nn.Module):
    """The same rows, about half of them on the device."""

    def __init__(self, weight: Tensor | None, store: str = "memory", optimizer: Any = ADAGRAD) -> None:
        super().__init__()
        table = [skirl.Table("a", rows=60, dim=3)]
        self.embeddings = skirl.EmbeddingBagCollection(
            table, optimizer=optimizer, cache=33, store=store, dtype=torch.float64
        )
        if weight is not None:
            skirl.import_rows(self.embeddings, {"a.weight": weight})

    def forward(self, batch: list[Tensor]) -> Tensor:
        return self.embeddings(sparse_of(batch))["a"]


class Model(lightning.LightningModule):
    rows: Any

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows
        self.top = nn.Linear(3, 1, dtype=torch.float64)
        self.trained: list[float] = []
        self.evaluated: list[float] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return (self.top(self.rows(batch)).squeeze(1) - batch[1]).square().mean()

    def training_step(self, batch, index) -> Any:
        loss = self.loss(batch)
        self.trained.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        loss = self.loss(batch)
        self.evaluated.append(loss.item())
        self.log("held_out", loss, batch_size=len(batch[0]))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


def samples(seed: int, batches: int) -> TensorDataset:
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 60, (4 * batches, 2), generator=chance)
    return TensorDataset(ids, torch.rand(4 * batches, generator=chance, dtype=torch.float64))


TRAINED, HELD_OUT = samples(1, 8), samples(2, 2)


def made(ours: bool, store: str = "memory", rows: bool = True) -> Model:
    """Make equal models. With `rows=False`, ours starts from other rows than plain's."""
    torch.manual_seed(0)
    weight = torch.rand(60, 3, dtype=torch.float64)
    model = Model(Ours(weight if rows else None, store) if ours else Bag(weight))
    torch.manual_seed(3)
    return model


def trainer_of(*callbacks: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    options = {"max_epochs": 2, "accelerator": "cpu", "enable_checkpointing": saves, **quiet, **options}
    return lightning.Trainer(callbacks=list(callbacks), **options)


def shuffled() -> DataLoader:
    return DataLoader(TRAINED, batch_size=4, shuffle=True)


def both(*callbacks: Any, loader: Any = shuffled, held_out: bool = False, **options: Any) -> tuple[Model, Model]:
    plain, ours, rows = made(ours=False), made(ours=True), Rows(sparse=sparse_of)
    after = DataLoader(HELD_OUT, batch_size=4) if held_out else None
    torch.manual_seed(5)
    trainer_of(*callbacks, **options).fit(plain, loader(), after)
    torch.manual_seed(5)
    trainer_of(*callbacks, rows, **options).fit(ours, rows.loader(loader()), after)
    return plain, ours


def check_same(plain: Model, ours: Model) -> None:
    assert len(plain.trained) > 4
    torch.testing.assert_close(ours.trained, plain.trained, **EXACT)
    torch.testing.assert_close(ours.evaluated, plain.evaluated, **EXACT)
    torch.testing.assert_close(ours.top.weight, plain.top.weight, **EXACT)
    torch.testing.assert_close(rows_of(ours), plain.rows.bag.weight.detach(), **EXACT)


def rows_of(model: Model) -> Tensor:
    """Return all rows; looking them up changes nothing."""
    with torch.no_grad():
        return model.rows.embeddings(skirl.KeyedJagged.one_hot(["a"], torch.arange(60)[:, None]))["a"]


@pytest.mark.parametrize(
    ("callbacks", "options"),
    [
        ([], {}),
        ([], {"accumulate_grad_batches": 3}),  # the last step of an epoch has only two micro-batches
        ([GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})], {"max_epochs": 3}),
        ([], {"limit_train_batches": 0.7, "accumulate_grad_batches": 2}),
        ([], {"plugins": [MixedPrecision("16-mixed", "cpu")]}),  # a scaler multiplies the loss by 65,536
    ],
    ids=["plain", "accumulated", "by epoch", "limited", "scaled"],
)
def test_fit_with_a_shuffled_loader(callbacks, options):
    check_same(*both(*callbacks, **options))


def test_validation_in_the_middle_of_an_epoch():
    plain, ours = both(held_out=True, val_check_interval=3, num_sanity_val_steps=2, loader=in_order)
    check_same(plain, ours)
    assert len(ours.evaluated) > 8
    without, rows = made(ours=True), Rows(sparse=sparse_of)
    torch.manual_seed(5)
    trainer_of(rows).fit(without, rows.loader(in_order()))
    assert without.trained == ours.trained and torch.equal(rows_of(without), rows_of(ours))


def in_order() -> DataLoader:
    return DataLoader(TRAINED, batch_size=4)


def test_a_data_module_that_makes_its_loader_anew_each_epoch():
    model, rows = made(ours=True), Rows(sparse=sparse_of)
    model.train_dataloader = lambda: rows.loader(in_order())
    trainer_of(rows, reload_dataloaders_every_n_epochs=1, max_epochs=3).fit(model)
    plain = made(ours=False)
    trainer_of(max_epochs=3).fit(plain, in_order())
    check_same(plain, model)


class Endless(IterableDataset):
    def __iter__(self):
        yield from (TRAINED[n] for n in range(len(TRAINED)))


def unsized() -> DataLoader:
    return DataLoader(Endless(), batch_size=4)


def test_a_loader_without_a_length():
    rows = Rows(sparse=sparse_of)
    with pytest.raises(ValueError, match=r"the loader has no length.*rows\.loader\(loader, length=\.\.\.\)"):
        trainer_of(rows).fit(made(ours=True), rows.loader(unsized()))
    with pytest.raises(ValueError, match="the loader ended after 8 batches, and the epoch should have 9: set length"):
        trainer_of(rows).fit(made(ours=True), rows.loader(unsized(), length=9))
    ours, plain = made(ours=True), made(ours=False)
    trainer_of(rows).fit(ours, rows.loader(unsized(), length=8))
    trainer_of().fit(plain, unsized())
    check_same(plain, ours)


def test_a_loader_that_is_not_wrapped_is_refused():
    with pytest.raises(ValueError, match=r"that skirl does not know: call"):
        trainer_of(Rows(sparse=sparse_of)).fit(made(ours=True), in_order())


def test_a_callback_that_is_forgotten_is_refused():
    with pytest.raises(ValueError, match=r"belongs to a skirl\.lightning\.Rows that is not among the trainer's"):
        trainer_of().fit(made(ours=True), Rows(sparse=sparse_of).loader(in_order()))


SAVES = {
    "within an epoch": {"every_n_train_steps": 3, "save_top_k": -1},
    "at its end": {"save_top_k": -1},
    "after validation": {"save_top_k": -1, "save_on_train_epoch_end": False},
}


@pytest.mark.parametrize(("when", "store"), [*((when, "memory") for when in SAVES), ("within an epoch", "disk")])
def test_resume_from_ckpt_path(tmp_path, when, store):
    """In another process, rows would have other values; so the model that resumes starts from different ones."""

    def run(folder: str, **fit: Any) -> tuple[Model, list[Path]]:
        where = f"disk:{tmp_path / folder}-rows" if store == "disk" else "memory"
        model, rows = made(ours=True, store=where, rows=not fit), Rows(sparse=sparse_of)
        keep = ModelCheckpoint(tmp_path / folder, filename="{epoch}-{step}", **SAVES[when])
        trainer = trainer_of(rows, keep, max_epochs=3, accumulate_grad_batches=2)
        trainer.fit(model, rows.loader(shuffled()), DataLoader(HELD_OUT, batch_size=4), **fit)
        return model, sorted((tmp_path / folder).glob("*.ckpt"))

    whole, written = run("whole")
    assert len(written) >= 3
    resumed, _ = run("resumed", ckpt_path=written[1])
    assert 0 < len(resumed.trained) < len(whole.trained)
    assert resumed.trained == whole.trained[-len(resumed.trained) :]
    assert torch.equal(rows_of(resumed), rows_of(whole)) and torch.equal(resumed.top.weight, whole.top.weight)
    if store == "disk":
        whole.rows.embeddings.close()
        resumed.rows.embeddings.close()


class Stateful:
    """A loader that resumes where it was, like a StatefulDataLoader."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return 8

    def __iter__(self):
        while self.at < 8:
            self.at += 1
            yield list(TRAINED[4 * self.at - 4 : 4 * self.at])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_resume_with_a_loader_that_has_a_state(tmp_path, caplog):
    """The loader is not read from its start again, and limit_train_batches counts from the beginning of the epoch."""
    limit = 6
    whole, rows = made(ours=True), Rows(sparse=sparse_of)
    options = {"limit_train_batches": limit, "max_epochs": 1, "accumulate_grad_batches": 2}
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer_of(rows, keep, **options).fit(whole, rows.loader(Stateful()))
    resumed, rows = made(ours=True, rows=False), Rows(sparse=sparse_of)
    with caplog.at_level(logging.WARNING, "skirl"):
        trainer_of(rows, keep, **options).fit(resumed, rows.loader(Stateful()), ckpt_path=tmp_path / "step=2.ckpt")
    assert resumed.trained == whole.trained[4:] and len(whole.trained) == 6
    assert torch.equal(rows_of(resumed), rows_of(whole)) and "skipping" not in caplog.text


def test_the_best_checkpoint_is_kept_and_tested(tmp_path):
    """When the trainer removes a checkpoint, its rows go too. last.ckpt may be a link."""
    model, rows = made(ours=True), Rows(sparse=sparse_of)
    best = ModelCheckpoint(tmp_path, monitor="held_out", mode="max", save_top_k=1, save_last="link")
    trainer = trainer_of(rows, best, max_epochs=4)
    held_out = DataLoader(HELD_OUT, batch_size=4)
    trainer.fit(model, rows.loader(in_order()), held_out)
    written = {path.name for path in tmp_path.iterdir()} - {"last.ckpt"}
    assert written == {Path(best.best_model_path).name, f"{Path(best.best_model_path).name}.rows"}
    at_end = rows_of(model)
    model.evaluated.clear()
    [result] = trainer.test(model, held_out, ckpt_path="best", verbose=False)
    assert result["held_out"] == pytest.approx(float(best.best_model_score or 0), rel=1e-6)
    again = made(ours=True, rows=False)
    skirl.load(f"{best.best_model_path}.rows", model=again)  # without a trainer
    assert torch.equal(rows_of(again), rows_of(model)) and torch.equal(again.top.weight, model.top.weight)
    assert not torch.equal(at_end, rows_of(made(ours=True)))
    with pytest.raises(RuntimeError, match=r"Rows are not in a state_dict: save and load them together with"):
        Model.load_from_checkpoint(best.best_model_path, rows=Ours(None), weights_only=False)


def test_checkpoints_without_rows_are_refused(tmp_path):
    rows = Rows(sparse=sparse_of)
    plain = trainer_of(max_epochs=1)
    plain.fit(made(ours=False), in_order())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match=r"plain\.ckpt was written without skirl\.lightning\.Rows and has no"):
        trainer_of(rows).fit(made(ours=True), rows.loader(in_order()), ckpt_path=tmp_path / "plain.ckpt")


def test_save_checkpoint_by_hand_once_max_steps_are_done(tmp_path):
    """Lightning then considers the epoch over, so the next one begins with the first batch."""

    def run(ours: bool) -> Model:
        model, rows = made(ours), Rows(sparse=sparse_of)
        trainer = trainer_of(*[rows] * ours, max_steps=3)
        trainer.fit(model, rows.loader(in_order()) if ours else in_order())
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        then, rows = made(ours, rows=False), Rows(sparse=sparse_of)
        again = trainer_of(*[rows] * ours)
        again.fit(then, rows.loader(in_order()) if ours else in_order(), ckpt_path=tmp_path / "a.ckpt")
        assert len(then.trained) == 8
        if ours:
            with pytest.raises(CheckpointError, match=r"s3://bucket/a\.ckpt is not on a file system: rows are saved"):
                trainer.save_checkpoint("s3://bucket/a.ckpt")
        return then

    check_same(run(ours=False), run(ours=True))


class Manual(Model):
    """Steps by itself, every second batch."""

    automatic_optimization = False

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        if index % 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def test_manual_optimization():
    torch.manual_seed(0)
    weight = torch.rand(60, 3, dtype=torch.float64)
    torch.manual_seed(3)
    plain = Manual(Bag(weight))
    torch.manual_seed(3)
    ours, rows = Manual(Ours(weight)), Rows(sparse=sparse_of, accumulate=2)
    trainer_of().fit(plain, in_order())
    trainer_of(rows).fit(ours, rows.loader(in_order()))
    check_same(plain, ours)


def test_predict_looks_rows_up_and_changes_nothing():
    model = made(ours=True)
    before = rows_of(model)
    model.predict_step = lambda batch: model.rows(batch)
    found = trainer_of(Rows(sparse=sparse_of)).predict(model, DataLoader(HELD_OUT, batch_size=4))
    plain = nn.functional.embedding_bag(HELD_OUT.tensors[0], before, mode="sum")
    torch.testing.assert_close(torch.cat(found), plain, **EXACT)
    assert torch.equal(rows_of(model), before)
    rows = Rows(sparse=sparse_of)
    trainer_of(rows).fit(model, rows.loader(in_order()))  # nothing of inference mode remains
