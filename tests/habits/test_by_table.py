"""A different optimizer, learning rate, weight decay or clip for each table, as people use param groups in PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import skirl
from tests.core.test_optim import mcmahan
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


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: lr_scheduler.OneCycleLR(rows, max_lr=[0.1, 0.2], total_steps=12, cycle_momentum=False),
        lambda rows: lr_scheduler.CosineAnnealingLR(rows, 10),
        lambda rows: lr_scheduler.CyclicLR(rows, [0.01, 0.02], [0.1, 0.2], step_size_up=3, cycle_momentum=False),
        lambda rows: lr_scheduler.SequentialLR(
            rows, [lr_scheduler.ConstantLR(rows, 0.1, 4), lr_scheduler.ExponentialLR(rows, 0.9)], [4]
        ),
    ],
)
def test_schedulers_of_torch(make: Any) -> None:
    plain, ours = Model(Bags()), Model(collection(TWO_RATES))
    found = []
    for model, rows in ((ours, ours.rows.optimizer), (plain, groups_of(plain))):
        schedule = make(rows)
        found.append(train(model, rows=rows, each=lambda step, s=schedule: s.step() if step else None, steps=8))
    equal(*found)


def test_a_schedule_of_momentum_is_refused_by_torch() -> None:
    with pytest.raises(ValueError, match="must support momentum"):
        lr_scheduler.OneCycleLR(collection().optimizer, max_lr=0.1, total_steps=9)


def test_a_rate_set_by_hand() -> None:
    plain, ours = Model(Bags()), Model(collection(TWO_RATES))
    found = []
    for model, rows in ((ours, ours.rows.optimizer), (plain, groups_of(plain))):

        def step(number: int, rows: Any = rows) -> None:
            rows.param_groups[1]["lr"] = 0.3 if number > 4 else 0.0

        found.append(train(model, rows=rows, each=step))
    equal(*found)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # raised by torch.optim.Adagrad itself
def test_another_optimizer_for_another_table_of_the_same_dim() -> None:
    class Both:
        """Two torch optimizers as one."""

        def __init__(self, model: Model) -> None:
            bags = model.rows.bags
            for bag in bags.values():
                bag.sparse = True
            self.all = [
                torch.optim.SparseAdam(bags["user"].parameters(), lr=0.05),
                torch.optim.Adagrad(bags["item"].parameters(), lr=0.1),
            ]

        def step(self) -> None:
            for each in self.all:
                each.step()

        def zero_grad(self) -> None:
            for each in self.all:
                each.zero_grad()

    plain, ours = Model(Bags()), Model(collection({"user": skirl.Adam(lr=0.05), "item": skirl.Adagrad(lr=0.1)}))
    equal(train(ours), train(plain, rows=Both(plain)))
    assert len(ours.rows.engine.banks) == 2


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


class EachRow:
    """Plain rows, each a parameter whose gradient is None if a batch does not contain it."""

    def __init__(self, model: Model, make: Any) -> None:
        self.weights = [bag.weight for bag in model.rows.bags.values()]
        self.rows = [[nn.Parameter(row.detach().clone()) for row in weight] for weight in self.weights]
        self.all = [make(i, rows) for i, rows in enumerate(self.rows)]
        self.data = iter(loader())

    def step(self) -> None:
        for weight, rows, ids in zip(self.weights, self.rows, next(self.data).values().view(2, -1), strict=True):
            for i, row in enumerate(rows):
                row.grad = weight.grad[i].clone() if i in ids else None
        for optimizer in self.all:
            optimizer.step()
        with torch.no_grad():
            for weight, rows in zip(self.weights, self.rows, strict=True):
                weight.copy_(torch.stack(list(rows)))

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None


def test_weight_decay_for_each_table_decays_the_rows_of_the_batch() -> None:
    plain = Model(Bags())
    ours = Model(collection({"user": skirl.SGD(lr=0.1, weight_decay=0.5), "*": skirl.SGD(lr=0.1)}))
    rows = EachRow(plain, lambda i, p: torch.optim.SGD(p, lr=0.1, weight_decay=(0.5, 0.0)[i]))
    equal(train(ours), train(plain, rows=rows))


def test_weight_decay_set_by_hand() -> None:
    plain, ours = Model(Bags()), Model(collection(skirl.Adagrad(lr=0.1)))
    rows = EachRow(plain, lambda i, p: torch.optim.Adagrad(p, lr=0.1))

    def step(number: int) -> None:
        for group in (*ours.rows.optimizer.param_groups, *(g for each in rows.all for g in each.param_groups)):
            group["weight_decay"] = 0.3 if number > 4 else 0.0

    equal(train(ours, each=step), train(plain, rows=rows, each=step))


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_with_momentum(nesterov: bool) -> None:
    plain, ours = Model(Bags()), Model(collection(skirl.SGD(lr=0.05, momentum=0.9, nesterov=nesterov)))
    rows = EachRow(plain, lambda i, p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=nesterov))
    equal(train(ours), train(plain, rows=rows))


def test_ftrl() -> None:
    class Paper:
        """McMahan's algorithm, one number at a time."""

        def __init__(self, model: Model) -> None:
            self.weights = [bag.weight for bag in model.rows.bags.values()]
            self.z = [-w.detach() * (1 / 0.3 + 0.1) - w.detach().sign() * 0.05 for w in self.weights]
            self.n = [torch.zeros_like(w) for w in self.weights]
            self.data = iter(loader())

        @torch.no_grad()
        def step(self) -> None:
            for w, z, n, ids in zip(self.weights, self.z, self.n, next(self.data).values().view(2, -1), strict=True):
                for row in ids.unique().tolist():
                    for d in range(w.shape[1]):
                        now = mcmahan(*(float(x[row, d]) for x in (w, z, n, w.grad)), 0.3, 1.0, 0.05, 0.1)
                        w[row, d], z[row, d], n[row, d] = now

        def zero_grad(self) -> None:
            for w in self.weights:
                w.grad = None

    plain, ours = Model(Bags()), Model(collection(skirl.FTRL(lr=0.3, l1=0.05, l2=0.1)))
    equal(train(ours), train(plain, rows=Paper(plain)))


def test_a_clip_for_one_table() -> None:
    ours = Model(collection({"user": skirl.SGD(lr=1.0, clip=1e-3), "*": skirl.SGD(lr=1.0)}))
    before, ids = rows_of(ours), loader(1)[0]
    ours.rows(ids).stacked().sum().backward()
    moved = {}
    for i, (name, rows) in enumerate(rows_of(ours).items()):
        moved[name] = (rows - before[name]).norm(dim=1)[ids.values().view(2, -1)[i]]
    torch.testing.assert_close(moved["user"], torch.full_like(moved["user"], 1e-3))
    assert (moved["item"] > 1).all()


def test_clip_grad_norm_leaves_rows_out() -> None:
    """As the docs say: rows are not parameters, and backward has already updated them by then."""
    ours, plain, ids = Model(collection()), Model(Bags()), loader(1)[0]
    before = rows_of(ours)
    norms = []
    for model in (ours, plain):
        model(ids).backward()
        norms.append(nn.utils.clip_grad_norm_(model.top.parameters() if model is plain else model.parameters(), 1e-9))
    torch.testing.assert_close(*norms)
    assert all((rows - before[name]).abs().max() > 1e-3 for name, rows in rows_of(ours).items())


def test_other_parameters_in_a_group_are_refused() -> None:
    model = Model(collection())
    with pytest.raises(ValueError, match="rows have one group for each pattern that the collection was made with"):
        model.rows.optimizer.add_param_group({"params": model.top.parameters()})


def test_step_and_zero_grad_of_the_rows_change_nothing() -> None:
    models = [Model(collection()) for _ in range(2)]
    equal(train(models[0], rows=models[0].rows.optimizer), train(models[1]))


def test_a_closure_is_called() -> None:
    model, ids = Model(collection()), loader(1)[0]
    before = rows_of(model)

    def closure() -> torch.Tensor:
        loss = model(ids)
        loss.backward()
        return loss

    assert model.rows.optimizer.step(closure) > 0
    assert not torch.equal(rows_of(model)["user"], before["user"])


def test_a_state_dict_of_the_rates_goes_round() -> None:
    one, other = collection(TWO_RATES), collection(TWO_RATES)
    one.optimizer.param_groups[1].update(lr=0.5, weight_decay=0.25)
    other.optimizer.load_state_dict(one.optimizer.state_dict())
    assert other.optimizer.settings() == one.optimizer.settings() == [(0.1, 0.0), (0.5, 0.25)]


KINDS = {"user": skirl.FTRL(lr=0.1, l1=0.01), "*": skirl.SGD(lr=0.1, momentum=0.9, weight_decay=0.1)}


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path, store: str) -> None:
    def made(name: str) -> tuple[Model, Any]:
        model = Model(collection(KINDS, store="memory" if store == "memory" else f"disk:{tmp_path / name}"))
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


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (
            KINDS | {"user": skirl.Adam()},
            "with table 'user'.optimizer = 'FTRL', here it is 'Adam': set it to",
        ),
        (KINDS | {"*": skirl.SGD()}, "with table 'item'.optimizer = 'SGD with momentum', here it is 'SGD': set it to"),
        (KINDS | {"*": skirl.SGD(momentum=0.5)}, "with table 'item'.optimizer.weight_decay = 0.1, here it is 0.0"),
        ({"u*": KINDS["user"], "*": KINDS["*"]}, r"with table 'user'.pattern = 'user', here it is 'u\*'"),
    ],
)
def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path: Path, optimizer: Any, says: str) -> None:
    skirl.save(tmp_path, model=Model(collection(KINDS)))
    with pytest.raises(skirl.CheckpointError, match=says):
        skirl.load(tmp_path, model=Model(collection(optimizer)))


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
    with pytest.raises(
        ValueError, match=r"lr of the group .* is 0.01 and was 0.1: FTRL computes rows from their state and lr"
    ):
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
