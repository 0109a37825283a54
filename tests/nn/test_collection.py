"""The modules as a user's model holds them: what they refuse, what they leave alone, and what torch does with them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import skirl
from skirl import SGD, Constant, EmbeddingBagCollection, EmbeddingCollection, KeyedJagged, Table, lookahead

A = Table("a", 100, 2, features=("x", "y"), init=Constant(1.0))
B = Table("b", 100, 2, init=Constant(1.0))


def made(*tables: Table, kind=EmbeddingBagCollection, **options):
    options = {"optimizer": SGD(lr=0.5), "cache": 50, **options}
    return kind(tables or (A, B), **options)


def one_hot(*rows: tuple[int, ...], keys: tuple[str, ...] = ("x", "y", "b")) -> KeyedJagged:
    return KeyedJagged.one_hot(keys, torch.tensor(rows))


@contextmanager
def ahead(embeddings, batches: list[KeyedJagged], **options) -> Iterator[Iterator[KeyedJagged]]:
    with lookahead(batches, embeddings, sparse=lambda ids: ids, **options) as opened:
        yield iter(opened)


def weight(embeddings, row: int, table: int = 0) -> list[float]:
    """Return a row's weight, as evaluation sees it."""
    place = embeddings.engine.schema.banks[0]
    names = embeddings.tables[table].features
    others = [f.name for f in place.features if f.name not in names]
    lengths = torch.tensor([1] + [0] * (len(names) - 1 + len(others)))
    with torch.no_grad():
        return embeddings(KeyedJagged([*names, *others], torch.tensor([row]), lengths=lengths))[names[0]][0].tolist()


def test_a_late_backward_among_micro_batches_is_refused():
    """Otherwise it would be dropped silently, because its step has already been applied."""
    embeddings = made()
    with ahead(embeddings, [one_hot((i, i, i)) for i in range(6)], accumulate=3) as batches:
        late = embeddings(next(batches))["x"].sum()
        embeddings(next(batches))["x"].sum().backward()
        next(batches)
        next(batches)
        with pytest.raises(RuntimeError, match="not current any more"):
            late.backward()
    assert weight(embeddings, 0) == [1.0, 1.0] and weight(embeddings, 1) == [0.5, 0.5]


def test_stacked_is_not_for_unpooled_rows():
    out = made(kind=EmbeddingCollection)(one_hot((1, 2, 3)))
    with pytest.raises(ValueError, match=r"of different lengths: take out\[feature\]"):
        out.stacked()


class TestWeights:
    def batch(self, weights: torch.Tensor | None) -> KeyedJagged:
        return KeyedJagged(["x", "y", "b"], torch.tensor([1, 2, 3]), lengths=torch.ones(3).long(), weights=weights)

    def test_weights_that_got_lost_are_noticed(self):
        embeddings = made()
        with ahead(embeddings, [self.batch(torch.ones(3))]) as batches:
            next(batches)
            with pytest.raises(ValueError, match="forward takes weights of ids as the lookahead yielded them"):
                embeddings(self.batch(None))


class TestAsAModule:
    def test_no_row_is_a_parameter_or_in_the_state(self):
        model = nn.ModuleDict({"rows": made(), "top": nn.Linear(2, 1)})
        model["rows"](one_hot((1, 2, 3)))["x"].sum().backward()
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        assert sizes == {"rows.anchor": 0, "top.weight": 2, "top.bias": 1}
        assert not list(model.buffers())
        state = model.state_dict()
        assert list(state) == ["rows._extra_state", "top.weight", "top.bias"]
        store = model["rows"].engine.store
        assert state["rows._extra_state"] == {"identity": store.identity, "generation": 0, "steps": 1}
        model.load_state_dict(state)

    def test_casts_and_moves_leave_rows_alone(self):
        model = nn.Sequential(made()).double().to("cpu").half().share_memory()
        out = model(one_hot((1, 2, 3)))
        assert out["x"].dtype == torch.float32
        out["x"].sum().backward()
        assert weight(model[0], 1) == [0.5, 0.5]

    def test_evaluation_has_no_graph_and_makes_no_rows(self):
        embeddings = made()
        embeddings.eval()
        out = embeddings(one_hot((1, 2, 3)))
        assert not out["x"].requires_grad and not out.stacked().requires_grad
        assert len(embeddings.engine.seen) == 0 and not embeddings.engine.caches
        embeddings.train()
        assert embeddings(one_hot((1, 2, 3)))["x"].requires_grad


@pytest.mark.parametrize("by_name_first", [True, False])
def test_a_feature_by_name_and_all_stacked_add_up_as_in_torch(by_name_first):
    """One loss may use both views: a feature without its own gradient still gets that of the stacked output."""
    embeddings, ids = made(optimizer=SGD(lr=1.0)), one_hot((1, 2, 3), (4, 2, 3))
    plain = {name: nn.Embedding(100, 2) for name in ("a", "b")}
    for table in plain.values():
        nn.init.constant_(table.weight, 1.0)
    rows = torch.tensor([[1, 2, 3], [4, 2, 3]])
    features = [plain["a"](rows[:, 0]), plain["a"](rows[:, 1]), plain["b"](rows[:, 2])]
    ((torch.stack(features, 1) * 3).sum() + features[0].sum() * 5).backward()
    for table in plain.values():
        with torch.no_grad():
            table.weight -= table.weight.grad
    out = embeddings(ids)
    first, second = (out["x"], out.stacked()) if by_name_first else (out.stacked(), out["x"])
    x, stacked = (first, second) if by_name_first else (second, first)
    ((stacked * 3).sum() + x.sum() * 5).backward()
    trained = embeddings.eval()(ids)
    for name, table, column in (("x", "a", 0), ("y", "a", 1), ("b", "b", 2)):
        assert torch.equal(trained[name], plain[table](rows[:, column])), name


def test_a_ctrl_c_as_backward_ends_finds_the_step_done(monkeypatch):
    """It cannot come between the last gradient and the update, or a later lookahead would apply the step late."""
    embeddings, ids = made(), one_hot((1, 2, 3))
    update = embeddings.current._update

    def pressed(work):
        signal.raise_signal(signal.SIGINT)
        update(work)

    out = embeddings(ids).stacked().sum()
    monkeypatch.setattr(embeddings.current, "_update", pressed)
    with pytest.raises(KeyboardInterrupt):
        out.backward()
    monkeypatch.undo()
    assert embeddings.current.work.applied
    after = embeddings.eval()(ids).stacked().clone()
    assert (after == 0.5).all()
    with lookahead([], embeddings.train(), sparse=lambda batch: batch):
        pass
    assert torch.equal(embeddings.eval()(ids).stacked(), after)


IDS = skirl.KeyedJagged.one_hot(["a"], torch.tensor([[1], [2]]))


def with_top() -> nn.ModuleDict:
    rows = skirl.EmbeddingBagCollection([skirl.Table("a", 10, 2)], optimizer=skirl.SGD(lr=0.1), cache=4)
    return nn.ModuleDict({"rows": rows, "top": nn.Linear(2, 1)})


def step(model: nn.ModuleDict) -> None:
    model["top"](model["rows"](IDS)["a"]).sum().backward()


def test_rows_of_another_store_snapshot_or_step_are_refused(tmp_path: Path) -> None:
    model = with_top()
    step(model)
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"other rows: {'identity': .* skirl\.save and skirl\.load"):
        with_top().load_state_dict(state)
    step(model)
    with pytest.raises(RuntimeError, match=r"other rows: .*'steps': 1}, here .*'steps': 2}"):
        model.load_state_dict(state)
    state = model.state_dict()
    skirl.save(tmp_path, model=model)
    with pytest.raises(RuntimeError, match=r"other rows: .*'generation': 0, .*, here .*'generation': 1"):
        model.load_state_dict(state)
    del state["rows._extra_state"]
    model.load_state_dict(state, strict=False)


def test_a_state_dict_fits_the_checkpoint_saved_with_it(tmp_path: Path) -> None:
    model = with_top()
    step(model)
    skirl.save(tmp_path, model=model)
    other = with_top()
    skirl.load(tmp_path, model=other)
    other.load_state_dict(model.state_dict())
    model.load_state_dict(other.state_dict())
