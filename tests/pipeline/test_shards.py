"""Steps of several shards: they have the bits of the plain reference and a plain tree, whatever is read ahead."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import skirl
from skirl import FTRL, SGD, Adagrad, Adam, KeyedJagged, RowwiseAdagrad, Table
from skirl.core.once import find
from skirl.core.reference import Reference
from skirl.peers.base import Alone
from skirl.pipeline.shards import Shards
from skirl.tools import rng_state
from skirl.train.verify import _bags
from tests.cases import cases
from tests.streams import stored_rows

TABLES = [Table("a", 50, 4, features=("x", "y")), Table("b", 30, 4, pooling="mean"), Table("c", 20, 2)]
FEATURES = ("x", "y", "b", "c")
ROWS = {"x": 50, "y": 50, "b": 30, "c": 20}


@dataclass
class Data:
    sparse: KeyedJagged
    labels: torch.Tensor


def draw(seed, batches, size=4, universe=12):
    """Draw batches in which most rows are in some shards of a step and not in others."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(batches):
        bags = {
            f: [rng.integers(0, min(ROWS[f], universe), rng.integers(0, 4)).tolist() for _ in range(size)]
            for f in FEATURES
        }
        if seed % 3 == 2:
            bags = {f: [bags[f][i] for i in rng.integers(0, size, size)] for f in FEATURES}
        ids = KeyedJagged.of_bags(bags)
        ids = find(ids, features=FEATURES[1:]) if seed % 3 == 2 else ids
        made.append(Data(ids, torch.from_numpy(rng.random(size).astype(np.float32))))
    return made


class Model(nn.Module):
    def __init__(self, embeddings, dtype=torch.float32, dropout=0.5):
        super().__init__()
        self.embeddings = embeddings
        generator = torch.Generator().manual_seed(3)
        self.first = nn.Parameter(torch.randn(14, 5, generator=generator, dtype=dtype))
        self.second = nn.Parameter(torch.randn(5, generator=generator, dtype=dtype))
        self.rare = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.dropout = nn.Dropout(dropout)

    def loss(self, batch, rare=True):
        out = self.embeddings(batch.sparse)
        x = torch.cat([out[f] for f in FEATURES], 1).to(self.first.device)
        scores = torch.mv(self.dropout(torch.relu(x @ self.first)), self.second)
        loss = (scores - batch.labels.to(scores.dtype)).tanh().square().mean()
        return loss + self.rare.sum().to(loss.dtype) if rare else loss


class Plain(nn.Module):
    """Rows of the reference as leaves of autograd."""

    def __init__(self, reference):
        super().__init__()
        self.reference = reference
        self.first = True
        """True if the next micro-batch begins a step."""

    def forward(self, sparse):
        out = self.reference.forward(_bags(sparse), accumulate=not self.first)
        self.leaves = {name: torch.from_numpy(values).requires_grad_() for name, values in out.items()}
        return self.leaves


def over_tree(parts):
    """Add neighbours until one is left. Return None if there is nothing to add."""
    while len(parts) > 1:
        pairs = [(parts[i], parts[i + 1] if i + 1 < len(parts) else None) for i in range(0, len(parts), 2)]
        parts = [a if b is None else b if a is None else a + b for a, b in pairs]
    return parts[0]


@dataclass
class Case:
    shards: int = 4
    accumulate: int = 1
    optimizer: object = Adam(lr=0.05, clip=0.1)
    cache: object = 60
    depth: object = 4
    seed: int = 0
    steps: int = 5
    dtype: torch.dtype = torch.float32
    lost: float = 0.0
    clip: bool = False
    guarded: bool = False
    """Whether the loop steps its dense weights only after the last shard, or after each one."""
    universe: int = 12
    """Number of rows of a table that are used."""

    @property
    def micros(self):
        return self.shards * self.accumulate

    def data(self):
        """Return the batches, and which of them have no backward, or use the rare weight."""
        count, chances = self.steps * self.micros, enumerate((self.lost, 0.4), start=1)
        lost, rare = (np.random.default_rng([self.seed, n]).random(count) < chance for n, chance in chances)
        return draw(self.seed, count, universe=self.universe), lost, rare


def with_skirl(case):
    """Return losses, dense weights and rows of the README's loop."""
    embeddings = skirl.EmbeddingBagCollection(
        TABLES, optimizer=case.optimizer, cache=case.cache, seed=7, dtype=case.dtype
    )
    model = Model(embeddings, case.dtype)
    dense, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    loader, lost, rare = case.data()
    with skirl.lookahead(loader, model, shards=case.shards, accumulate=case.accumulate, depth=case.depth) as batches:
        for i, batch in enumerate(batches):
            loss = model.loss(batch, rare[i])
            losses.append(loss.item())
            if not lost[i]:
                loss.backward()
            if not case.guarded or batches.ends_step:
                if case.clip:
                    batches.reduce()  # the last shard may have no backward
                    nn.utils.clip_grad_norm_([model.first, model.second], 0.05)
                dense.step()
                dense.zero_grad()
    embeddings.flush()
    weights = [w.detach() for w in (model.first, model.second, model.rare)]
    return losses, weights, stored_rows(embeddings.engine)


def in_plain_python(case):
    """Do the same with the reference, autograd for each micro-batch by itself, and a separate tree."""
    numbers = np.float32 if case.dtype == torch.float32 else np.float64
    reference = Reference(TABLES, case.optimizer, seed=7, dtype=numbers)
    plain = Plain(reference)
    model = Model(plain, case.dtype)
    weights = [model.first, model.second, model.rare]
    dense, losses = torch.optim.Adam(weights, lr=0.01), []
    loader, lost, rare = case.data()
    wide = 1 << (case.accumulate - 1).bit_length()
    for step in range(case.steps):
        of_rows, of_dense = [], [[None] * (case.shards * wide) for _ in weights]
        for micro in range(case.micros):
            i = step * case.micros + micro
            rng_state.swap_in(7, step + 1, micro)
            plain.first = micro == 0
            loss = model.loss(loader[i], rare[i])
            losses.append(loss.item())
            of_rows.append({})
            if lost[i]:
                continue
            grads = torch.autograd.grad(loss, [*weights, *plain.leaves.values()], allow_unused=True)
            of_rows[-1] = {n: g.numpy() for n, g in zip(plain.leaves, grads[3:])}
            leaf = micro // case.accumulate * wide + micro % case.accumulate
            for slot, grad in zip(of_dense, grads):
                slot[leaf] = grad
        rng_state.swap_out()
        reference.backward(*of_rows, shards=case.shards)
        for weight, parts in zip(weights, of_dense):
            total = over_tree(parts)
            weight.grad = None if total is None else total / case.shards
        if case.clip:
            nn.utils.clip_grad_norm_(weights[:2], 0.05)
        dense.step()
        dense.zero_grad()
    return losses, [w.detach() for w in weights], reference.rows


def check_equal(ours, expected):
    assert ours[0] == expected[0]
    for a, b in zip(ours[1], expected[1], strict=True):
        assert torch.equal(a, b)
    assert ours[2].keys() == expected[2].keys()
    for key, record in expected[2].items():
        assert ours[2][key].tobytes() == record.tobytes(), f"row {key & 2**48 - 1} of table {key >> 48}"


OPTIMIZERS = [
    Adam(lr=0.05, clip=0.1),
    SGD(lr=0.1, momentum=0.9),
    Adagrad(lr=0.1),
    RowwiseAdagrad(lr=0.1, clip=0.2),
    FTRL(lr=0.1),
]


@cases(12)
@given(st.data())
def test_every_bit_is_that_of_the_reference(data):
    draw = data.draw
    shards, accumulate = draw(st.sampled_from([(2, 1), (4, 1), (8, 1), (16, 1), (2, 3), (4, 2)]))
    case = Case(
        shards, accumulate, draw(st.sampled_from(OPTIMIZERS)), draw(st.sampled_from([60, 100])),
        draw(st.sampled_from([1, 4, "auto", "epoch"])), draw(st.integers(0, 1 << 20)),
        steps=draw(st.integers(1, 4)), dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        lost=draw(st.sampled_from([0.0, 0.0, 0.3])), clip=draw(st.booleans()), guarded=draw(st.booleans()),
    )  # fmt: skip
    check_equal(with_skirl(case), in_plain_python(case))


def test_shards_are_no_batch():
    """Their bits differ from those of one batch, or nothing here would prove anything; the numbers agree up to rounding."""
    case = Case(dtype=torch.float64, optimizer=SGD(lr=0.1))
    other = Case(shards=2, accumulate=2, dtype=torch.float64, optimizer=SGD(lr=0.1))
    assert with_skirl(case)[1][0].ne(with_skirl(other)[1][0]).any()


def made(**options):
    embeddings = skirl.EmbeddingBagCollection(TABLES, optimizer=SGD(lr=0.1), cache=100)
    model = Model(embeddings, **options)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def refusal(run):
    with pytest.raises((RuntimeError, ValueError)) as caught:
        run()
    return str(caught.value)


def loop(model, dense, loader, each=lambda batch, batches: None, **options):
    """Run the README's loop with an extra call in its body, and return the steps begun."""
    with skirl.lookahead(loader, model, shards=2, **options) as batches:
        for batch in batches:
            model.loss(batch).backward()
            each(batch, batches)
            dense.step()
            dense.zero_grad()
    return batches.step


def test_what_makes_no_step_is_left_out_and_said(caplog):
    """Fewer shards than a step has, or a smaller last shard; whether or not the epoch is known."""
    for depth in (4, "epoch"):
        for rest in (draw(1, 1), draw(1, 2, size=4)[:1] + draw(2, 1, size=3)):
            model, dense = made()
            caplog.clear()
            assert loop(model, dense, draw(0, 4) + rest, depth=depth) == 2
            assert "of the pass are left out: a step of 2 shards needs 2 batches of equal size" in caplog.text


@pytest.mark.parametrize("depth", [4, "epoch"])
def test_uneven_shards(depth):
    model, dense = made()
    said = refusal(lambda: loop(model, dense, draw(0, 3) + draw(1, 1, size=3) + draw(2, 2), depth=depth))
    assert said.startswith("batches 2 to 3 are the shards of one step and have 4, 3 samples: have the loader yield")


def test_models_whose_results_depend_on_who_computes_what():
    model, dense = made()
    model.add_module("norm", nn.BatchNorm1d(3))
    assert refusal(lambda: loop(model, dense, draw(0, 2))).startswith("BatchNorm1d 'norm' keeps running statistics")
    model.norm.eval()
    assert loop(model, dense, draw(0, 2)) == 1
    model.norm = nn.BatchNorm1d(3, track_running_stats=False)
    assert loop(model, dense, draw(0, 2)) == 1


def test_weights_that_the_lookahead_does_not_know():
    """They would be stepped by the gradients of one shard. Another model, trained alongside, may do what it likes."""
    model, dense = made()
    top = nn.Linear(1, 1)
    other, beside = torch.optim.SGD(top.parameters(), lr=0.1), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)

    def run(mine):
        with skirl.lookahead(draw(0, 4), model, shards=2) as batches:
            for batch in batches:
                loss = model.loss(batch)
                (loss + top(torch.ones(1)).sum()).backward() if mine else loss.backward()
                if not mine:
                    top(torch.ones(1)).sum().backward()
                for optimizer in (dense, other, beside):
                    optimizer.step()
                    optimizer.zero_grad()

    run(mine=False)
    assert "train weights that are not in the model" in refusal(lambda: run(mine=True))


def test_random_numbers_are_those_of_the_shard(tmp_path):
    """The loader draws what it would without shards, whatever the loop draws. A checkpoint has the run's own state."""
    drawn = []

    class Shuffled:
        def __iter__(self):
            for batch in draw(0, 6):
                drawn.append(torch.rand(1).item())
                yield batch

    def run(draws):
        torch.manual_seed(5)
        drawn.clear()
        inside = []

        def each(batch, batches):
            inside.append([torch.rand(1).item() for _ in range(draws)] + [np.random.rand()])  # noqa: NPY002
            if batches.step == 2 and batches.ends_step:
                skirl.save(tmp_path / str(draws), model=model, optimizers=[dense], data=batches)

        model, dense = made()
        loop(model, dense, Shuffled(), each)
        return list(drawn), inside, torch.rand(1).item()

    one, two = run(1), run(2)
    assert one[0] == two[0] and one[2] == two[2]
    assert [row[0] for row in one[1]] == [row[0] for row in two[1]]
    assert len({row[0] for row in one[1]}) == 6
    again, dense = made()
    with skirl.lookahead(draw(0, 6), again, shards=2) as batches:
        skirl.load(tmp_path / "1", model=again, optimizers=[dense], data=batches)
        first = next(iter(batches))
        assert batches.step == 3 and first.labels.tolist() == draw(0, 6)[4].labels.tolist()
    with skirl.lookahead(draw(0, 6), again, shards=4) as batches:
        told = refusal(lambda: skirl.load(tmp_path / "1", model=again, optimizers=[dense], data=batches))
        assert "the run was saved with shards=2: set it to that, not 4" in told


def test_random_numbers_do_not_depend_on_the_trainer():
    """Shards 2 and 3 draw the same if a trainer has only these."""
    drawn = []
    for mine, micros in ((range(4), (2, 3)), (range(2, 4), (0, 1))):
        loop = Shards(made()[0], 4, 1, 7, mine, Alone())
        drawn.append([])
        for micro in micros:
            loop.begin(5, micro)
            drawn[-1].append(torch.rand(1).item())
        loop.close()
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1]


def test_a_step_that_is_left_in_the_middle_never_happened():
    model, dense = made(dropout=0.0)
    before = [w.detach().clone() for w in model.parameters()]
    with skirl.lookahead(draw(0, 4), model, shards=4) as batches:
        for i, batch in enumerate(batches):
            model.loss(batch).backward()
            dense.step()
            if i == 2:
                break
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert batches.state_dict()["batches"] == 0 and model.embeddings.engine.packs[0].steps.sum() == 0


def test_a_save_before_the_last_shard_is_refused(tmp_path):
    model, dense = made()

    def too_early(batch, batches):
        if not batches.ends_step:
            skirl.save(tmp_path, model=model, optimizers=[dense], data=batches)

    assert "rows are updated after the last: save when batches.ends_step is true" in refusal(
        lambda: loop(model, dense, draw(0, 4), too_early)
    )
