"""What trainers send each other of dense gradients, whose bits tests/test_trainers.py compares with those of one process."""

import torch

from skirl.core.tree import BlockSum, add_lists
from skirl.peers.dense import OfAllTrainers
from tests.threads_as_trainers import InProcess

WEIGHTS = [torch.zeros(shape) for shape in ((3,), (), (5,))]


def test_what_a_trainer_sends():
    """To each other trainer: the sums of its subtrees, for one piece, and then the means of another piece."""
    numbers = sum(weight.numel() for weight in WEIGHTS)
    piece = -(-(numbers + 3) // 3)

    def work(peers):
        sums = OfAllTrainers(peers, 4)
        grads = [torch.ones_like(weight) for weight in WEIGHTS]
        block = BlockSum(sums.mine, add_lists)
        for leaf in sums.mine:
            block.take(leaf, [grad.clone() for grad in grads])
        sums.mean(grads, block.totals())
        return [count // 4 for count in peers.channel("dense").counters.bytes_sent]

    # Of 4 shards, the trainers have 0; 1; and 2 and 3, which are one subtree each.
    assert InProcess.run(3, work) == [[0 if a == b else 2 * piece for a in range(3)] for b in range(3)]
