"""The costs on this machine of a step of one trainer, of a message and of a byte."""

import json
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch

from skirl.measure.bench.limited import Job, Way
from skirl.measure.bench.namespaces import trained
from skirl.peers.base import Alone
from skirl.peers.job import trainers

ROUNDS = 400
LARGE = 1 << 20
"""Numbers in a large message."""


def computed(samples: int, dim: int, dense: int, seed: int = 0) -> tuple[float, float]:
    """Measure the seconds and the CPU seconds of a step of one trainer alone, with all rows in its cache.

    **Arguments**

    - `samples`: samples in the step.
    - `dim`: numbers in a row.
    - `dense`: approximate number of dense weights.
    - `seed`: seed of ids and weights.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    job = Job(dense, samples, dim, read=8, steps=8, seed=seed)
    try:
        with ExitStack() as stack:
            way = Way(job, Alone(), list(job.source), stack)
            turns = [way.turn() for _ in range(4)][1:]
    finally:
        torch.set_num_threads(before)
    best = min(turns, key=lambda turn: turn["seconds"])
    return best["seconds"], best["cpu"]


def talked() -> tuple[float, float]:
    """Measure the CPU seconds of a message each way and of a byte each way, with two processes over loopback."""
    said = trained(2, __name__, [])
    return max(one["message"] for one in said), max(one["byte"] for one in said)


def of_rank() -> dict[str, Any]:
    """Exchange small messages, then large ones, with the other process, and return their CPU seconds."""
    torch.set_num_threads(1)
    with trainers() as peers:
        channel = peers.channel("rows")

        def took(numbers: int, rounds: int) -> float:
            part = torch.zeros(peers.size, numbers)
            out = torch.zeros(peers.size, numbers)
            used = time.process_time()
            for _ in range(rounds):
                channel.swap(part, [1] * peers.size, [1] * peers.size, out)
            return (time.process_time() - used) / rounds

        took(1, 50)
        message = took(1, ROUNDS)
        byte = (took(LARGE, 20) - message) / (4 * LARGE)
    return {"message": message / (peers.size - 1), "byte": max(0.0, byte)}


if __name__ == "__main__":
    print(json.dumps(of_rank()))
    sys.stdout.flush()
