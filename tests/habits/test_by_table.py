"""A different optimizer, learning rate, weight decay or clip for each table, as people use param groups in PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import skirl
from tests.habits.two_tables import Bags, Model, collection, equal, loader, rows_of, train

TWO_RATES = {"user": skirl.SGD(lr=0.1), "*": skirl.SGD(lr=0.02)}


def groups_of(model: Model, **options: Any) -> torch.optim.Optimizer:
    bags = model.rows.bags
    return torch.optim.SGD(
        [{"params": bags["user"].parameters(), "lr": 0.1}, {"params": bags["item"].parameters(), "lr": 0.02}], **options
    )


def test_a_learning_rate_for_each_table() -> None:
    plain = Model(Bags())
    ours = Model(collection(TWO_RATES))
    equal(train(ours), train(plain, rows=groups_of(plain)))
    assert len(ours.rows.engine.banks) == 1
    groups = ours.rows.optimizer.param_groups
    assert [(g["name"], g["tables"], g["lr"]) for g in groups] == [("user", ["user"], 0.1), ("*", ["item"], 0.02)]


def test_a_schedule_for_each_group() -> None:
    plain, ours = Model(Bags()), Model(collection(TWO_RATES))
    found = []
    for model, rows in ((ours, ours.rows.optimizer), (plain, groups_of(plain))):
        schedule = lr_scheduler.LambdaLR(rows, [lambda step: 0.5**step, lambda step: 1 / (1 + step)])

        def step(number: int, schedule: Any = schedule) -> None:
            if number:
                schedule.step()

        found.append(train(model, rows=rows, each=step))
    equal(*found)


@pytest.mark.parametrize("frozen", [False, True])
def test_stacked_over_tables_of_several_optimizers(frozen: bool) -> None:
    """Their rows are in separate caches, but the tensor and its gradient do not show it."""
    found = []
    for use in ("stacked", "by name"):
        model = Model(collection({"item": skirl.Adagrad(lr=0.1), "user": skirl.SGD(lr=0.1)}))
        if frozen:
            model.rows.freeze("item")

        def loss(model: Model, ids: Any, use: str = use) -> torch.Tensor:
            out = model.rows(ids)
            if use == "by name":
                return model.top(torch.cat([out["user"], out["item"]], 1)).square().sum() + out["item"].sum()
            return model.top(out.stacked().flatten(1)).square().sum() + out["item"].sum()

        found.append(train(model, loss=loss))
    equal(*found)


def test_a_clip_for_one_table() -> None:
    ours = Model(collection({"user": skirl.SGD(lr=1.0, clip=1e-3), "*": skirl.SGD(lr=1.0)}))
    before, ids = rows_of(ours), loader(1)[0]
    ours.rows(ids).stacked().sum().backward()
    moved = {}
    for i, (name, rows) in enumerate(rows_of(ours).items()):
        moved[name] = (rows - before[name]).norm(dim=1)[ids.values().view(2, -1)[i]]
    torch.testing.assert_close(moved["user"], torch.full_like(moved["user"], 1e-3))
    assert (moved["item"] > 1).all()


def test_other_parameters_in_a_group_are_refused() -> None:
    model = Model(collection())
    with pytest.raises(ValueError, match="rows have one group for each pattern that the collection was made with"):
        model.rows.optimizer.add_param_group({"params": model.top.parameters()})


KINDS = {"user": skirl.FTRL(lr=0.1, l1=0.01), "*": skirl.SGD(lr=0.1, momentum=0.9, weight_decay=0.1)}


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    def made(name: str) -> tuple[Model, Any]:
        model = Model(collection(KINDS, store=f"disk:{tmp_path / name}"))
        return model, lr_scheduler.LambdaLR(model.rows.optimizer, [lambda step: 1.0, lambda step: 0.8**step])

    def run(model: Model, schedule: Any, load: bool, save: int | None) -> dict[str, torch.Tensor]:
        with skirl.lookahead(loader(), model, sparse=lambda ids: ids) as batches:
            if load:
                skirl.load(tmp_path / "c", model=model, optimizers=[schedule], data=batches)
            for ids in batches:
                model(ids).backward()
                schedule.step()
                if batches.step == save:
                    skirl.save(tmp_path / "c", model=model, optimizers=[schedule], data=batches)
                    break
        return rows_of(model)

    whole = run(*made("whole"), load=False, save=None)
    run(*made("cut"), load=False, save=5)
    resumed = run(*made("resumed"), load=True, save=None)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_rows_go_out_and_in_with_the_state_of_each_tables_optimizer(tmp_path: Path) -> None:
    model = Model(collection(KINDS))
    train(model)
    skirl.export(model, tmp_path / "rows.safetensors")
    skirl.save(tmp_path / "c", model=model)
    others = []
    for source in ("rows.safetensors", "c"):
        others.append(Model(collection(KINDS)))
        others[-1].top.load_state_dict(model.top.state_dict())
        skirl.import_rows(others[-1], tmp_path / source)
        assert others[-1].rows.engine.table_steps.tolist() == [12, 12]
    expected = train(model, steps=3)
    for other in others:
        equal(train(other, steps=3), expected)


def ftrl(lr: float, **more) -> skirl.EmbeddingBagCollection:
    return skirl.EmbeddingBagCollection([skirl.Table("a", 9, 2)], optimizer=skirl.FTRL(lr=lr), cache=9, **more)


def trained_ftrl(lr: float) -> skirl.EmbeddingBagCollection:
    rows = ftrl(lr)
    for _ in range(3):
        rows(skirl.KeyedJagged.one_hot(["a"], torch.tensor([[1], [2]])))["a"].square().sum().backward()
    return rows


def test_another_rate_of_ftrl_is_refused_since_it_would_move_rows_by_itself(tmp_path):
    rows = trained_ftrl(0.1)
    rows.optimizer.param_groups[0]["lr"] = 0.01
    with pytest.raises(ValueError, match=r"lr of the group .* is 0.01 and was 0.1: FTRL computes rows from their"):
        rows(skirl.KeyedJagged.one_hot(["a"], torch.tensor([[1]])))["a"].sum().backward()
    skirl.save(tmp_path, model=trained_ftrl(0.1))
    with pytest.raises(ValueError, match=r"lr"):
        skirl.load(tmp_path, model=ftrl(0.01))


def test_rows_that_move_to_another_rate_of_ftrl_stay_where_they_were(tmp_path):
    source = trained_ftrl(0.1)
    skirl.save(tmp_path / "save", model=source)
    skirl.export(source, tmp_path / "rows.safetensors")
    for path in (tmp_path / "save", tmp_path / "rows.safetensors"):
        here = ftrl(0.01)
        try:
            skirl.import_rows(here, path)
        except ValueError as error:
            assert "do not follow from their state" in str(error) and path.suffix
            continue
        before = here.rows("a", [1])
        (here(skirl.KeyedJagged.one_hot(["a"], torch.tensor([[1]])))["a"].sum() * 1e-9).backward()
        torch.testing.assert_close(here.rows("a", [1]), before, rtol=1e-4, atol=1e-6)
    same = ftrl(0.1)
    skirl.import_rows(same, tmp_path / "rows.safetensors")
    assert torch.equal(same.rows("a", range(9)), source.rows("a", range(9)))


def test_rows_set_by_hand_under_ftrl():
    rows = trained_ftrl(0.1)
    with pytest.raises(ValueError, match="which computes rows from their state: pass state='reset'"):
        rows.set_rows("a", [1], torch.ones(1, 2))
    rows.set_rows("a", [1], torch.tensor([[5.0, -5.0]]), state="reset")
    (rows(skirl.KeyedJagged.one_hot(["a"], torch.tensor([[1]])))["a"].sum() * 1e-9).backward()
    torch.testing.assert_close(rows.rows("a", [1]), torch.tensor([[5.0, -5.0]]), rtol=1e-4, atol=1e-6)
