"""A different optimizer, learning rate, weight decay or clip for each table, as people use param groups in PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import skirl
from tests.habits.plain import RATE, Plain, Tower, assert_equal, batches, loss_of, rows_of, train

TWO_RATES = {"user": skirl.SGD(lr=RATE), "*": skirl.SGD(lr=0.02)}


def test_a_learning_rate_and_a_schedule_for_each_table() -> None:
    plain, ours = Plain(), Tower(optimizer=TWO_RATES)
    rates = {"user": RATE, "item": 0.02}
    groups = torch.optim.SGD([{"params": plain.rows[name].parameters(), "lr": lr} for name, lr in rates.items()])
    found = []
    for model, rows in ((ours, ours.rows.optimizer), (plain, groups)):
        schedule = lr_scheduler.LambdaLR(rows, [lambda step: 0.5**step, lambda step: 1 / (1 + step)])

        def step(number: int, schedule: Any = schedule) -> None:
            if number:
                schedule.step()

        assert [group["lr"] for group in rows.param_groups] == [RATE, 0.02]
        found.append(train(model, batches(12), rows=groups, each=step))
    assert_equal(*found)
    assert len(ours.rows.engine.banks) == 1
    assert [(g["name"], g["tables"]) for g in ours.rows.optimizer.param_groups] == [("user", ["user"]), ("*", ["item"])]


@pytest.mark.parametrize("frozen", [False, True])
def test_stacked_over_tables_of_several_optimizers(frozen: bool) -> None:
    """Their rows are in separate caches, but the tensor and its gradient do not show it."""

    def stacked(model: Tower, ids: skirl.KeyedJagged) -> torch.Tensor:
        out = model.rows(ids)
        return loss_of(model.top, dict(zip(out, out.stacked().unbind(1), strict=True))) + out["bought"].sum()

    def by_name(model: Tower, ids: skirl.KeyedJagged) -> torch.Tensor:
        out = model.look_up(ids)
        return loss_of(model.top, out) + out["bought"].sum()

    found = []
    for forward in (stacked, by_name):
        model = Tower(optimizer={"item": skirl.Adagrad(lr=RATE), "user": skirl.SGD(lr=RATE)})
        if frozen:
            model.rows.freeze("item")
        found.append(train(model, batches(12), forward=forward))
    assert_equal(*found)


def test_a_clip_for_one_table() -> None:
    ours = Tower(optimizer={"user": skirl.SGD(lr=1.0, clip=1e-3), "*": skirl.SGD(lr=1.0)})
    before, [ids] = rows_of(ours), batches(1)
    ours.rows(ids).stacked().sum().backward()
    moved = {name: (rows - before[name]).norm(dim=1) for name, rows in rows_of(ours).items()}
    moved = {name: norms[norms > 0] for name, norms in moved.items()}
    torch.testing.assert_close(moved["user"], torch.full_like(moved["user"], 1e-3))
    assert len(moved["user"]) > 4 and (moved["item"] > 1).all()


def test_other_parameters_in_a_group_are_refused() -> None:
    model = Tower()
    with pytest.raises(ValueError, match="rows have one group for each pattern that the collection was made with"):
        model.rows.optimizer.add_param_group({"params": model.top.parameters()})


KINDS = {"user": skirl.FTRL(lr=0.1, l1=0.01), "*": skirl.SGD(lr=0.1, momentum=0.9, weight_decay=0.1)}


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    def run(name: str, load: bool = False, save: int | None = None) -> dict[str, torch.Tensor]:
        model = Tower(optimizer=KINDS, store=f"disk:{tmp_path / name}")
        schedule = lr_scheduler.LambdaLR(model.rows.optimizer, [lambda step: 1.0, lambda step: 0.8**step])
        with skirl.lookahead(batches(12), model, sparse=lambda ids: ids) as ahead:
            if load:
                skirl.load(tmp_path / "c", model=model, optimizers=[schedule], data=ahead)
            for ids in ahead:
                model(ids).backward()
                schedule.step()
                if ahead.step == save:
                    skirl.save(tmp_path / "c", model=model, optimizers=[schedule], data=ahead)
                    break
        return rows_of(model)

    whole, _, resumed = run("whole"), run("cut", save=5), run("resumed", load=True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_rows_go_out_and_in_with_the_state_of_each_tables_optimizer(tmp_path: Path) -> None:
    model = Tower(optimizer=KINDS)
    train(model, batches(12))
    skirl.export(model, tmp_path / "rows.safetensors")
    skirl.save(tmp_path / "c", model=model)
    others = [Tower(optimizer=KINDS) for _ in range(2)]
    for other, source in zip(others, ("rows.safetensors", "c"), strict=True):
        other.top.load_state_dict(model.top.state_dict())
        skirl.import_rows(other, tmp_path / source)
        assert other.rows.engine.packs[0].steps.tolist() == [12, 12]
    expected = train(model, batches(3))
    for other in others:
        assert_equal(train(other, batches(3)), expected)


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
