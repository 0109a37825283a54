"""Row optimizers against their references: torch.optim on coalesced sparse gradients, and FBGEMM's row-wise Adagrad."""

import math

import numpy as np
import pytest
import torch

from skirl.core.groups import Groups, Setting, TorchHandle
from skirl.core.optim import COLUMNS, FTRL, SGD, Adagrad, Adam, RowOptimizer, RowwiseAdagrad
from skirl.core.tables import Table
from skirl.engine.kernels import cpu
from skirl.engine.kernels.tree import ONE, Gradients
from skirl.engine.packs import Pack

ROWS, DIM = 12, 5

DECAYING = {"lr": 0.3, "lr_decay": 0.2, "eps": 1e-3, "initial_accumulator_value": 0.5}
QUICK = {"lr": 0.3, "betas": (0.5, 0.7), "eps": 1e-2}
AHEAD = {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.1}
TORCH = [
    (SGD(lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
    (Adagrad(lr=0.3), lambda p: torch.optim.Adagrad(p, lr=0.3)),
    (Adagrad(**DECAYING), lambda p: torch.optim.Adagrad(p, **DECAYING)),
    (Adam(lr=0.3), lambda p: torch.optim.SparseAdam(p, lr=0.3)),
    (Adam(**QUICK), lambda p: torch.optim.SparseAdam(p, **QUICK)),
]


def update(optimizer: RowOptimizer, cache, rows, positions, grads, step):
    """Run one step of the kernel, in which row i's gradient is the sum of grads[positions[i]]."""
    start = np.concatenate([[0], np.cumsum([len(p) for p in positions])]).astype(np.int32)
    flat = np.concatenate(positions).astype(np.int32)
    bag_of = np.arange(len(grads), dtype=np.int32)
    scalars = np.array([optimizer.numbers(optimizer.lr, optimizer.weight_decay, step)], cache.dtype)
    cpu.update_kernel(optimizer.rule)(
        cache, DIM, rows.astype(np.int32), rows.astype(np.int64),
        Gradients(start, flat, bag_of, np.empty(0, cache.dtype), grads, np.array([True])), ONE, scalars, 0, len(rows),
    )  # fmt: skip


def batches(dtype, steps):
    rng = np.random.default_rng(1)
    for step in range(1, steps + 1):
        ids = rng.integers(0, ROWS, 15)
        grads = rng.standard_normal((15, DIM)).astype(dtype)
        rows = np.unique(ids)
        yield step, ids, rows, [np.flatnonzero(ids == row) for row in rows], grads


def new_cache(optimizer, dtype):
    cache = np.full((ROWS, optimizer.width(DIM)), optimizer.initial_state, dtype)
    cache[:, :DIM] = np.random.default_rng(0).standard_normal((ROWS, DIM))
    return cache


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # raised by torch.optim.Adagrad itself
@pytest.mark.parametrize(("optimizer", "make"), TORCH, ids=[repr(o) for o, _ in TORCH])
@pytest.mark.parametrize(("dtype", "steps", "within"), [(np.float32, 1, 1e-5), (np.float64, 100, 1e-12)])
def test_agrees_with_torch(optimizer, make, dtype, steps, within):
    cache = new_cache(optimizer, dtype)
    parameter = torch.nn.Parameter(torch.from_numpy(cache[:, :DIM].copy()))
    theirs = make([parameter])
    for step, ids, rows, positions, grads in batches(dtype, steps):
        update(optimizer, cache, rows, positions, grads, step)
        sparse = torch.sparse_coo_tensor(ids[None], torch.from_numpy(grads), (ROWS, DIM), check_invariants=True)
        parameter.grad = sparse.coalesce()
        theirs.step()
    np.testing.assert_allclose(cache[:, :DIM], parameter.detach().numpy(), rtol=0, atol=within)
    state = theirs.state[parameter]
    for name, part in optimizer.unpack(DIM).items():
        if name != "weight":
            np.testing.assert_allclose(cache[:, part], state[name].numpy(), rtol=within, atol=within)


BY_ROW = [
    (SGD(lr=0.3, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=0.1)),
    (SGD(lr=0.3, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9)),
    (SGD(**AHEAD), lambda p: torch.optim.SGD(p, **AHEAD)),
    (Adagrad(lr=0.3, weight_decay=0.1), lambda p: torch.optim.Adagrad(p, lr=0.3, weight_decay=0.1)),
]


@pytest.mark.parametrize(("optimizer", "make"), BY_ROW, ids=[repr(o) for o, _ in BY_ROW])
@pytest.mark.parametrize(("dtype", "steps", "within"), [(np.float32, 1, 1e-5), (np.float64, 100, 1e-12)])
def test_agrees_with_torch_over_one_parameter_a_row(optimizer, make, dtype, steps, within):
    """Torch does nothing to a parameter whose gradient is None; the same goes for a row that is not in the batch."""
    cache = new_cache(optimizer, dtype)
    parameters = [torch.nn.Parameter(torch.from_numpy(row.copy())) for row in cache[:, :DIM]]
    theirs = make(parameters)
    for step, ids, rows, positions, grads in batches(dtype, steps):
        update(optimizer, cache, rows, positions, grads, step)
        for row, parameter in enumerate(parameters):
            parameter.grad = torch.from_numpy(grads[ids == row].sum(0)) if row in rows else None
        theirs.step()
    for row, parameter in enumerate(parameters):
        np.testing.assert_allclose(cache[row, :DIM], parameter.detach().numpy(), rtol=0, atol=within)
        for name in optimizer.state_names:
            expected = theirs.state[parameter].get(name)
            expected = torch.zeros(DIM) if expected is None else expected
            np.testing.assert_allclose(cache[row, optimizer.unpack(DIM)[name]], expected, rtol=within, atol=within)


@pytest.mark.parametrize(("dtype", "steps", "within"), [(np.float32, 1, 1e-5), (np.float64, 100, 1e-12)])
def test_adam_decays_as_l2_in_the_gradient_of_sparse_adam(dtype, steps, within):
    optimizer = Adam(lr=0.3, weight_decay=0.1)
    cache = new_cache(optimizer, dtype)
    parameter = torch.nn.Parameter(torch.from_numpy(cache[:, :DIM].copy()))
    theirs = torch.optim.SparseAdam([parameter], lr=0.3)
    for step, ids, rows, positions, grads in batches(dtype, steps):
        update(optimizer, cache, rows, positions, grads, step)
        g = torch.zeros_like(parameter).index_add_(0, torch.from_numpy(ids), torch.from_numpy(grads))
        decayed = (g + 0.1 * parameter).detach()[rows]
        parameter.grad = torch.sparse_coo_tensor(rows[None], decayed, (ROWS, DIM), check_invariants=True)
        theirs.step()
    np.testing.assert_allclose(cache[:, :DIM], parameter.detach().numpy(), rtol=0, atol=within)


def mcmahan(w, z, n, g, alpha, beta, l1, l2):
    """Return w, z and n of one number after gradient g, by Per-Coordinate FTRL-Proximal (McMahan et al., algorithm 1)."""
    sigma = (math.sqrt(n + g * g) - math.sqrt(n)) / alpha
    z, n = z + g - sigma * w, n + g * g
    w = 0.0 if abs(z) <= l1 else -(z - math.copysign(l1, z)) / ((beta + math.sqrt(n)) / alpha + l2)
    return w, z, n


@pytest.mark.parametrize("numbers", [(0.3, 1.0, 0.0, 0.0), (0.1, 0.5, 0.7, 0.2), (0.2, 0.0, 1.5, 0.5)])
def test_ftrl_agrees_with_the_paper_number_by_number(numbers):
    """From 0, as in the paper, and from other weights, with the z that the paper's own formula for w gives them."""
    alpha, beta, l1, l2 = numbers
    optimizer = FTRL(lr=alpha, beta=beta, l1=l1, l2=l2)
    cache = new_cache(optimizer, np.float64)
    cache[: ROWS // 2, :DIM] = 0
    w = cache[:, :DIM].copy()
    z, n = -(w * (beta / alpha + l2) + np.sign(w) * l1), np.zeros_like(w)
    for step, ids, rows, positions, grads in batches(np.float64, 60):
        grads[:, 2] = 0 if step % 3 else grads[:, 2]  # some rows have no gradient at first
        update(optimizer, cache, rows, positions, grads, step)
        for row in rows:
            for d in range(DIM):
                g = grads[ids == row, d].sum()
                w[row, d], z[row, d], n[row, d] = mcmahan(w[row, d], z[row, d], n[row, d], g, *numbers)
    np.testing.assert_allclose(cache, np.concatenate([w, z, n], 1), rtol=1e-12, atol=1e-12)
    assert l1 == 0 or 0.02 < (cache[:, :DIM] == 0).mean() < 0.9


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "steps", "within"), [(np.float32, 1, 1e-5), (np.float64, 100, 1e-12)])
def test_rowwise_adagrad_agrees_with_its_definition(weight_decay, dtype, steps, within):
    optimizer = RowwiseAdagrad(lr=0.3, eps=1e-3, weight_decay=weight_decay)
    cache = new_cache(optimizer, dtype)
    w = torch.from_numpy(cache[:, :DIM].copy())
    s = torch.zeros(ROWS, dtype=w.dtype)
    for step, ids, rows, positions, grads in batches(dtype, steps):
        update(optimizer, cache, rows, positions, grads, step)
        g = torch.zeros(ROWS, DIM, dtype=w.dtype).index_add_(0, torch.from_numpy(ids), torch.from_numpy(grads))
        g = (g + weight_decay * w)[rows]
        s[rows] += (g**2).mean(1)
        w[rows] -= (0.3 / (s[rows].sqrt() + 1e-3))[:, None] * g
    np.testing.assert_allclose(cache[:, :DIM], w.numpy(), rtol=0, atol=within)
    np.testing.assert_allclose(cache[:, DIM], s.numpy(), rtol=within, atol=within)


def test_rowwise_adagrad_agrees_with_fbgemm():
    """Without weight decay: FBGEMM 1.8.0 accepts the parameter on the CPU but ignores it (we follow its CUDA kernel)."""
    pytest.importorskip("fbgemm_gpu", reason="not installed: constraints/others.txt")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    dim = 8  # FBGEMM wants a multiple of 4
    optimizer = RowwiseAdagrad(lr=0.3, eps=1e-3)
    theirs = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)], optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.3, eps=1e-3,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    cache = np.zeros((ROWS, dim + 1), np.float32)
    cache[:, :dim] = rng.standard_normal((ROWS, dim))
    theirs.split_embedding_weights()[0].data.copy_(torch.from_numpy(cache[:, :dim]))
    for step in range(1, 4):
        ids = rng.integers(0, ROWS, 15)
        offsets = np.array([0, 4, 4, 9, 15])
        out = theirs(torch.from_numpy(ids), torch.from_numpy(offsets))
        pooled = np.empty((4, dim), np.float32)
        none = np.empty(0, np.float32)
        bags = offsets[:-1].astype(np.int32), offsets[1:].astype(np.int32)
        cpu.pool(cache, dim, ids.astype(np.int32), *bags, 1, none, pooled, 0, 4)
        np.testing.assert_allclose(pooled, out.detach().numpy(), rtol=0, atol=1e-5)
        grads = rng.standard_normal((4, dim)).astype(np.float32)
        out.backward(torch.from_numpy(grads))
        rows, group = np.unique(ids, return_inverse=True)
        start = np.concatenate([[0], np.cumsum(np.bincount(group))]).astype(np.int32)
        positions = np.argsort(group, kind="stable").astype(np.int32)
        bag_of = np.repeat(np.arange(4), np.diff(offsets)).astype(np.int32)
        scalars = np.array([optimizer.numbers(optimizer.lr, optimizer.weight_decay, step)], np.float32)
        cpu.update_kernel(optimizer.rule)(
            cache, dim, rows.astype(np.int32), rows,
            Gradients(start, positions, bag_of, none, grads, np.array([True])), ONE, scalars, 0, len(rows),
        )  # fmt: skip
    (weight,), ((momentum,),) = theirs.split_embedding_weights(), theirs.split_optimizer_states()
    np.testing.assert_allclose(cache[:, :dim], weight.numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(cache[:, dim], momentum.numpy(), rtol=1e-5)


def test_clip_scales_a_row_to_its_norm():
    cache = np.zeros((2, DIM))
    grads = np.array([[3.0, 4.0, 0, 0, 0], [0.3, 0.4, 0, 0, 0]])
    update(SGD(lr=1.0, clip=1.0), cache, np.arange(2), [np.array([0]), np.array([1])], grads, 1)
    np.testing.assert_allclose(-cache, [[0.6, 0.8, 0, 0, 0], [0.3, 0.4, 0, 0, 0]])


TABLES = [Table(name, 9, 4) for name in ("user_id", "item", "user_city", "a[b]")]


def test_the_first_pattern_that_matches_counts():
    groups = Groups(TABLES, {"user_city": SGD(lr=1.0), "a[b]": SGD(lr=2.0), "user_*": SGD(lr=3.0), "*": SGD(lr=4.0)})
    assert [rule.lr for rule in groups] == [3.0, 4.0, 1.0, 2.0]
    assert [group.tables for group in groups.all] == [(2,), (3,), (0,), (1,)]
    assert Groups(TABLES, SGD()).all == (("*", SGD(), (0, 1, 2, 3)),)


def test_a_pattern_that_comes_too_late_is_refused():
    with pytest.raises(ValueError, match="optimizer has 'item', which is not the first match of any table"):
        Groups(TABLES, {"*": SGD(), "item": Adam()})


def test_scalars_are_those_of_each_tables_rule_and_settings():
    groups = Groups(TABLES, {"item": Adam(clip=2.0), "user_*": Adam(weight_decay=0.5), "*": Adagrad()})
    settings, steps = [Setting(0.1, 0.0), Setting(0.2, 0.25), Setting(0.3, 0.0)], np.array([1, 2, 3, 4])
    found = groups.scalars([0, 1, 2], settings, steps, np.float64)
    expected = [
        Adam().numbers(0.2, 0.25, 1),
        Adam(clip=2.0).numbers(0.1, 0.0, 2),
        Adam().numbers(0.2, 0.25, 3),
        [0.0] * COLUMNS,
    ]
    assert found.tolist() == [list(own) for own in expected]
    kinds = [(optimizer.rule, optimizer.initial_state) for optimizer in groups]
    assert kinds[0] == kinds[1] != kinds[3]


def test_two_rules_of_one_name_do_not_share_rows():
    def adagrad(w, g, s, n):
        return w - n[0] * g * s, s

    class Other(Adagrad):
        update = staticmethod(adagrad)

    first, second = Pack(TABLES, {"item": Other(), "*": Adagrad()}, 0).kinds[:2]
    assert first != second


def made(optimizer=None):
    return TorchHandle(Groups([Table("user", 9, 4), Table("item", 9, 4)], optimizer or SGD(lr=1.0)))


def test_each_group_has_its_settings():
    handle = made({"user": Adam(lr=0.5, weight_decay=0.1), "*": SGD(lr=2.0)})
    handle.param_groups[1]["lr"] = torch.tensor(0.25)
    handle.param_groups[0]["weight_decay"] = 0.2
    assert handle.settings() == [(0.5, 0.2), (0.25, 0.0)]


def test_the_state_of_other_groups_is_refused():
    handle = made({"user": Adam(), "*": SGD()})
    with pytest.raises(ValueError, match=r"has the groups \['\*'\] of tables .*, but this collection has \['user', "):
        handle.load_state_dict(made().state_dict())
