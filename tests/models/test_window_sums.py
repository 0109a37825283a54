"""Sums of windows of rows, compared with the same sums in a loop of torch's additions, to the bit."""

import pytest
import torch

from skirl.models.loops import fit
from skirl.models.sums import list_sums
from skirl.models.window_sums import window_sums
from tests.models.test_weighing import WINDOWS, drawn

pytestmark = pytest.mark.skipif(not fit(torch.zeros(1)), reason="the loops need lanes")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", WINDOWS)
def test_rows_are_summed_and_their_gradients_too(shape: str, threads: int) -> None:
    """Forward adds a window's rows in their order; backward adds the gradients of a row's windows in theirs."""
    rows, _, windows = drawn(shape, 5, torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = window_sums(windows)
        grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
        found.backward(grad)
    finally:
        torch.set_num_threads(before)
    of_rows = torch.zeros_like(rows)
    for window, (begin, end) in enumerate(zip(windows.begins.tolist(), windows.ends.tolist(), strict=True)):
        total = torch.zeros(5)
        for i in range(begin, end):
            total += rows.detach()[i]
            of_rows[i] += grad[window]
        assert torch.equal(found[window], total)
    assert rows.grad is not None and torch.equal(rows.grad, of_rows)


@pytest.mark.parametrize("shape", WINDOWS)
def test_copies_give_the_same_sums_where_our_loops_do_not_run(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for loops in (True, False):
        monkeypatch.setattr("skirl.models.sums.fit", lambda *of, loops=loops: loops)
        rows, _, windows = drawn(shape, 5, torch.float32)
        out = list_sums(windows)
        out.backward(torch.arange(out.numel()).view(out.shape).sin())
        found.append((out.detach(), rows.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
