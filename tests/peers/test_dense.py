"""The mean of dense gradients equals that of one tree over the shards, bit for bit, however many trainers hold them."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from skirl.core.tree import BlockSum, add_lists, leaves_of
from skirl.peers.dense import OfAllTrainers
from tests.cases import cases
from tests.threads_as_trainers import InProcess

WEIGHTS = [
    torch.zeros(shape, dtype=dtype)
    for shape, dtype in [((3,), torch.float32), ((2, 2), torch.float64), ((), torch.float32), ((5,), torch.float32)]
]


def tree(parts: list[np.ndarray | None]) -> np.ndarray | None:
    """Return the plain sum by halves, and halves of halves. Missing parts add nothing."""
    if len(parts) == 1:
        return parts[0]
    left, right = tree(parts[: len(parts) // 2]), tree(parts[len(parts) // 2 :])
    return right if left is None else left if right is None else left + right


def gradients(leaves: int, seed: int) -> list[list[np.ndarray | None]]:
    """Return gradients of all weights for each leaf: small, large, zeros of both signs, and some missing."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(leaves):
        row = []
        for weight in WEIGHTS:
            value = rng.standard_normal(weight.shape) * 10.0 ** rng.integers(-4, 5)
            value = np.where(rng.random(weight.shape) < 0.3, -0.0, value).astype(weight.numpy().dtype)
            row.append(None if rng.random() < 0.3 else value)
        found.append(row)
    for n in range(len(WEIGHTS)):
        if rng.random() < 0.2:
            for row in found:
                row[n] = None
    return found


def bits(grad: np.ndarray | torch.Tensor | None) -> bytes | None:
    return None if grad is None else np.asarray(grad).tobytes()


def summed(peers, shards: int, accumulate: int, steps: list[list[list[np.ndarray | None]]]) -> list[list[bytes | None]]:
    """Return the means that a trainer gets, step by step; from the third step on for fewer weights."""
    sums, found, kept = OfAllTrainers(peers, shards, accumulate), [], []
    for number, step in enumerate(steps):
        some = slice(number // 2, None)
        block = BlockSum(sums.mine, add_lists)
        for leaf in sums.mine:
            grads = [None if grad is None else torch.from_numpy(np.array(grad)) for grad in step[leaf][some]]
            if any(grad is not None for grad in grads):
                block.take(leaf, grads)
        mean = sums.mean(WEIGHTS[some], block.totals())
        found.append([bits(grad) for grad in mean])
        kept.append(mean)
    assert [[bits(grad) for grad in mean] for mean in kept] == found, "a later step changed what an earlier one gave"
    return found


@cases(120)
@given(st.integers(1, 8), st.integers(0, 4), st.integers(1, 3), st.integers(0, 10**6))
def test_bits_are_those_of_the_tree(size, height, accumulate, seed):
    shards = max(1 << height, 1 << (size - 1).bit_length())
    leaves = leaves_of(range(shards), accumulate).stop
    steps = [gradients(leaves, seed + number) for number in range(3)]
    want = []
    for number, step in enumerate(steps):
        sums = [tree([row[n] for row in step]) for n in range(number // 2, len(WEIGHTS))]
        want.append([None if s is None else bits(s * s.dtype.type(1 / shards) + s.dtype.type(0)) for s in sums])
    assert InProcess.run(size, lambda peers: summed(peers, shards, accumulate, steps)) == [want] * size


def test_what_a_trainer_receives():
    """From each other trainer: the sums of its subtrees, for one piece, and then the means of another piece."""
    numbers = sum(weight.numel() for weight in WEIGHTS if weight.dtype == torch.float32)
    piece = -(-(numbers + 3) // 3)

    def work(peers):
        sums = OfAllTrainers(peers, 4)
        grads = [torch.ones_like(weight) for weight in WEIGHTS if weight.dtype == torch.float32]
        block = BlockSum(sums.mine, add_lists)
        for leaf in sums.mine:
            block.take(leaf, [grad.clone() for grad in grads])
        sums.mean(grads, block.totals())
        return [count // 4 for count in peers.channel("dense").counters.bytes_received]

    # Of 4 shards, the trainers have 0; 1; and 2 and 3, which are one subtree each.
    assert InProcess.run(3, work) == [[0 if a == b else 2 * piece for a in range(3)] for b in range(3)]
