"""The products of pairs, compared bit for bit with written-out sums and with torch's own operations."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import config
from torch import Tensor

from skirl.models import pairs as module
from skirl.models.pairs import by_torch, pairs, places
from tests.cases import cases
from tests.models.plain import on_threads

COMPILED = not config.DISABLE_JIT  # pyright: ignore[reportAttributeAccessIssue]


def drawn(seed: int, batch: int, n: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draw x, vectors, and a gradient of the result."""
    draw = torch.Generator().manual_seed(seed)
    sizes = ((batch, dim), (batch, n, dim), (batch, dim + n * (n + 1) // 2))
    x, vectors, grad = (torch.randn(size, generator=draw).to(dtype) for size in sizes)
    return x.requires_grad_(), vectors.requires_grad_(), grad


def written_out(x: Any, vectors: Any, grad: Any) -> tuple[Any, Any, Any]:
    """Return result and gradients, computed by one multiplication and one addition after another."""
    rows = np.concatenate([x[:, None], vectors], 1)
    pair = [(i, j) for i in range(rows.shape[1]) for j in range(i)]
    out = np.zeros_like(grad)
    out[:, : x.shape[1]] = x
    for p, (i, j) in enumerate(pair, x.shape[1]):
        for d in range(x.shape[1]):
            out[:, p] = out[:, p] + rows[:, i, d] * rows[:, j, d]
    sums = np.zeros_like(rows)
    sums[:, 0] = grad[:, : x.shape[1]]
    place = {one: p for p, one in enumerate(pair, x.shape[1])}
    for i in range(rows.shape[1]):
        for j in range(rows.shape[1]):
            if i != j:
                sums[:, i] = sums[:, i] + grad[:, place[max(i, j), min(i, j)], None] * rows[:, j]
    return out, sums[:, 0], sums[:, 1:]


def results(function: Any, x: Tensor, vectors: Tensor, grad: Tensor) -> list[Tensor]:
    out = function(x, vectors, places(1 + vectors.shape[1]))
    return [out.detach(), *torch.autograd.grad(out, [x, vectors], grad)]


@pytest.mark.skipif(not COMPILED, reason="without compiled kernels torch's operations are taken")
@cases(100)
@given(
    seed=st.integers(0, 1 << 30), batch=st.integers(0, 5), n=st.integers(1, 36), dim=st.sampled_from([3, 9, 16]),
    dtype=st.sampled_from([torch.float32, torch.float64]), threads=st.integers(1, 3),
)  # fmt: skip
def test_bits_are_those_of_sums_written_out(
    seed: int, batch: int, n: int, dim: int, dtype: torch.dtype, threads: int
) -> None:
    x, vectors, grad = drawn(seed, batch, n, dim, dtype)
    found = on_threads(threads, lambda: results(pairs, x, vectors, grad))
    expected = written_out(*(part.detach().numpy() for part in (x, vectors, grad)))
    for mine, its in zip(found, expected, strict=True):
        assert mine.numpy().tobytes() == its.tobytes()


@pytest.mark.parametrize("dim", [16, 257])
def test_they_are_torchs_to_rounding(dim: int) -> None:
    x, vectors, grad = drawn(3, 7, 26, dim, torch.float64)
    for mine, its in zip(results(pairs, x, vectors, grad), results(by_torch, x, vectors, grad), strict=True):
        torch.testing.assert_close(mine, its)


def test_vectors_may_lie_anyhow() -> None:
    x, vectors, grad = drawn(4, 5, 6, 8, torch.float32)
    aslant = vectors.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert not aslant.is_contiguous()
    for mine, its in zip(results(pairs, x, aslant, grad), results(pairs, x, vectors, grad), strict=True):
        assert torch.equal(mine, its)


def test_other_numbers_and_captured_graphs_take_torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("the kernels were called")

    monkeypatch.setattr(module._Pairs, "apply", refuse)
    x, vectors, _ = (part.detach() for part in drawn(6, 4, 3, 8, torch.float32))
    assert pairs(x.bfloat16(), vectors.bfloat16(), places(4)).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert pairs(x, vectors, places(4)).shape == (4, 14)
    for what in ("compiler.is_compiling", "jit.is_tracing"):
        with monkeypatch.context() as patch:
            patch.setattr(f"torch.{what}", lambda: True)
            assert torch.equal(pairs(x, vectors, places(4)), by_torch(x, vectors, places(4)))
