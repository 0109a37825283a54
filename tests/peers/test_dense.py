"""The sum of dense gradients is that of one tree over the shards, bit for bit, however many trainers hold them."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skirl.core.tree import block_of
from skirl.peers.alone import Alone
from skirl.peers.dense import Dense
from skirl.peers.errors import PeerError
from skirl.peers.in_process import InProcess
from tests.cases import cases

SHAPES = [(3,), (2, 2), (), (5,)]


def tree(parts: list[np.ndarray | None]) -> np.ndarray | None:
    """The plain sum: halves, and halves of halves; what is not there adds nothing."""
    if len(parts) == 1:
        return parts[0]
    left, right = tree(parts[: len(parts) // 2]), tree(parts[len(parts) // 2 :])
    return right if left is None else left if right is None else left + right


def gradients(shards: int, seed: int) -> list[list[np.ndarray | None]]:
    """Of each shard, those of all parameters: small, large, zeros of both signs, and some that are not there."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(shards):
        row = []
        for shape in SHAPES:
            value = rng.standard_normal(shape).astype(np.float32) * np.float32(10.0) ** rng.integers(-4, 5)
            value = np.where(rng.random(shape) < 0.3, np.float32(-0.0), value).astype(np.float32)
            row.append(None if rng.random() < 0.3 else value)
        found.append(row)
    for n in range(len(SHAPES)):
        if rng.random() < 0.2:
            for row in found:
                row[n] = None
    return found


def summed(peers, shards: int, per_step: list[list[list[np.ndarray | None]]]) -> list[list[bytes | None]]:
    """What an optimizer would find in `.grad`, step by step."""
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    found = []
    with Dense(peers, weights, shards=shards) as dense:
        for given_ in per_step:
            dense.begin()
            mine = block_of(peers.rank, peers.size, shards)
            for shard in mine:
                for weight, grad in zip(weights, given_[shard]):
                    weight.grad = None if grad is None else torch.from_numpy(np.array(grad))
                if shard + 1 in mine:
                    dense.next_shard()
            dense.reduce()
            dense.reduce()
            found.append([None if w.grad is None else w.grad.numpy().tobytes() for w in weights])
    return found


@cases(120)
@given(st.integers(1, 8), st.integers(0, 4), st.integers(0, 10**6))
def test_bits_are_those_of_the_tree(size, height, seed):
    shards = max(1 << height, 1 << (size - 1).bit_length())
    steps = [gradients(shards, seed), gradients(shards, seed + 1)]
    sums = [[tree([row[n] for row in step]) for n in range(len(SHAPES))] for step in steps]
    want = [[None if s is None else (s * np.float32(1 / shards)).tobytes() for s in step] for step in sums]
    found = InProcess.run(size, lambda peers: summed(peers, shards, steps))
    assert found == [want] * size


def test_alone_with_all_shards_is_the_same_tree():
    steps = [gradients(8, 5)]
    assert [summed(Alone(), 8, steps)] * 3 == InProcess.run(3, lambda peers: summed(peers, 8, steps))


def train(peers, optimizers, seed: int = 0, shards: int = 2, loop=None) -> list[list[float]]:
    """Two layers trained on this rank's shards with several optimizers; their weights."""
    layers = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    drawn = np.random.default_rng(seed)  # ranks are threads here, and torch's generator is one for all
    for weight in layers.parameters():
        weight.data.copy_(torch.from_numpy(drawn.standard_normal(weight.shape)))
    made = [make(list(layer.parameters())) for make, layer in zip(optimizers, layers)]
    with Dense(peers, layers.parameters(), shards=shards) as dense:
        for step in range(3):
            dense.begin()
            mine = block_of(peers.rank, peers.size, shards)
            for shard in mine:
                x = torch.from_numpy(np.random.default_rng((step, shard)).standard_normal((4, 3))).float()
                layers(x).square().mean().backward()
                if shard + 1 in mine:
                    dense.next_shard()
            if loop is not None:
                loop(dense, layers, made)
            else:
                for optimizer in made:
                    optimizer.step()
            layers.zero_grad()
    return [weight.tolist() for weight in layers.parameters()]


SGD = lambda weights: torch.optim.SGD(weights, lr=0.1)  # noqa: E731
ADAM = lambda weights: torch.optim.Adam(weights, lr=0.1)  # noqa: E731


def test_the_loop_as_it_is_trains_the_same_weights_on_all_ranks():
    want = train(Alone(), [SGD, ADAM])
    assert InProcess.run(2, lambda peers: train(peers, [SGD, ADAM])) == [want] * 2


def test_gradients_are_summed_once_and_before_they_are_clipped():
    def loop(dense, layers, made):
        dense.reduce()
        torch.nn.utils.clip_grad_norm_(layers.parameters(), 0.01)
        for optimizer in made:
            optimizer.step()

    want = train(Alone(), [SGD, SGD], loop=loop)
    assert InProcess.run(2, lambda peers: train(peers, [SGD, SGD], loop=loop)) == [want] * 2
    assert want != train(Alone(), [SGD, SGD])


def test_a_closure_is_called_before_gradients_are_summed():
    def work(peers, given_how):
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = SGD([weight])

        def closure():
            weight.grad = torch.full((2,), float(peers.rank + 1))
            return 5.0

        with Dense(peers, [weight], shards=2) as dense:
            dense.begin()
            return given_how(optimizer, closure), weight.tolist()

    for how in (lambda o, c: o.step(c), lambda o, c: o.step(closure=c)):
        assert InProcess.run(2, lambda peers, how=how: work(peers, how)) == [(5.0, pytest.approx([-0.15, -0.15]))] * 2


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all():
    def work(peers):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer, scaler = SGD([weight]), torch.amp.GradScaler("cpu", init_scale=4.0)
        with Dense(peers, [weight], shards=2) as dense:
            dense.watch(scaler)
            found = []
            for bad in (0, 1):
                dense.begin()
                loss = (weight * (float("inf") if bad and peers.rank == 1 else 1.0)).sum()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                found.append((weight.tolist(), scaler.get_scale()))
        assert "step" not in vars(scaler)
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = InProcess.run(2, work)
    assert first == second and first[0][0] == first[1][0] and first[1][1] == 2.0


def test_rank_0_has_the_weights_that_all_begin_with():
    def work(peers):
        tensors = [torch.full((3, 2), float(peers.rank)), torch.tensor(peers.rank), torch.empty(0)]
        Dense(peers, [], shards=4).share(tensors)
        return [tensor.tolist() for tensor in tensors]

    assert InProcess.run(3, work) == [[[[0.0, 0.0]] * 3, 0, []]] * 3


def test_another_model_on_one_rank_ends_all():
    with pytest.raises(PeerError, match="rank 1 has a model of other shapes than rank 0"):
        InProcess.run(2, lambda peers: Dense(peers, [torch.zeros(2 + peers.rank)], shards=2).share())


def test_what_would_train_wrongly_is_refused():
    ours, other = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="3 trainers share 2 shards"):
        Dense(InProcess.job(3)[0], [ours], shards=2)
    with Dense(Alone(), [ours], shards=2) as dense:
        dense.begin()
        ours.grad = other.grad = torch.ones(1)
        with pytest.raises(
            RuntimeError, match=r"1 of this trainer are to come: step optimizers when batches.ends_step"
        ):
            SGD([ours]).step()
        with pytest.raises(ValueError, match="1 of 2 parameters of SGD are not in the model"):
            SGD([ours, other]).step()
        SGD([other]).step()
        dense.next_shard()
        ours.grad = torch.ones(1).to_sparse()
        with pytest.raises(ValueError, match="sparse gradient"):
            dense.reduce()
        with pytest.raises(RuntimeError, match="shard 1 is the last one"):
            dense.next_shard()
    SGD([other]).step()
