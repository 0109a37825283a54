"""All random generators go on as if they had not been used."""

import random

import numpy as np
import torch

from skirl.checkpoint.codec import decode, encode
from skirl.tools import rng_state


def draws() -> list[float]:
    drawn = [torch.rand(1).item(), torch.randn(3).sum().item(), random.random(), random.gauss()]
    return [*drawn, np.random.rand(), np.random.randn()]  # noqa: NPY002


def test_restored_through_a_checkpoint() -> None:
    draws()  # leaves a second normal number pending in two of them
    coded = encode(rng_state.capture(), "x")
    expected = [draws() for _ in range(400)]  # past the point where the state words are regenerated
    rng_state.restore(decode(*coded))
    assert [draws() for _ in range(400)] == expected
