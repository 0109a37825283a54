"""The benchmark of GPU kernels, in the interpreter: it counts the bytes that have to move, and times all kernels."""

import numpy as np
import pytest

from skirl.core.optim import Adam
from skirl.engine.device import open_device
from skirl.measure.bench.kernels import Kernels, _Shared


def test_every_kernel_is_timed_beside_a_copy():
    bench = Kernels(device="interpret", dim=4, batch=8, features=3, cache=100, rounds=1)
    result = bench.run()
    assert set(result["share_of_copy"]) == {
        "forward", "backward, sgd", "backward, rowwise-adagrad", "backward, adagrad", "backward, adam",
        "backward, ftrl", "backward, sgd-momentum",
    }  # fmt: skip
    assert all(share > 0 for share in result["share_of_copy"].values()) and result["copy_gb_s"] > 0
    assert 15 <= result["distinct"] <= 24
    assert "of the copy's bandwidth" in bench.summary(result)["forward"]


def test_bytes_are_those_that_have_to_move():

    at = open_device("interpret", np.dtype(np.float32)).at
    shared = _Shared(Kernels(device="interpret", dim=4, batch=8, features=3, cache=100), at)
    assert shared.forward()[1] == 24 * (4 * 4 * 2 + 4)
    rows = shared.distinct
    plan = rows * (4 + 8) + (rows + 1) * 4 + 2 * 24 * 4
    assert shared.backward(Adam())[1] == 24 * 4 * 4 + 2 * rows * 12 * 4 + plan


def test_the_cpu_has_a_benchmark_of_its_own():
    with pytest.raises(ValueError, match="for the CPU kernels, use skirl bench rows"):
        Kernels(device="cpu")
