"""Exchanges of random parts, uneven or empty, and the results that every kind of peers must give."""

import hashlib

import numpy as np
import torch

from skirl.peers.base import Peers

KINDS = ("<i8", "<i4", "|u1", "<f4")


def drawn(size: int, seed: int, call: int) -> np.ndarray:
    """Return how much each rank sends to each other one in a call: [ranks, ranks], often nothing."""
    rng = np.random.default_rng((seed, call))
    return rng.integers(0, 200, (size, size)) * (rng.random((size, size)) < 0.7)


def part(seed: int, call: int, sender: int, receiver: int, length: int, kind: str = "<f4") -> np.ndarray:
    return np.random.default_rng((seed, call, sender, receiver)).integers(0, 100, length).astype(kind)


def talk(peers: Peers, seed: int, calls: int = 6) -> list[str]:
    """Exchange and swap, and return digests of what arrived in each call."""
    size, mine, said = peers.size, peers.rank, []
    for call in range(calls):
        counts = drawn(size, seed, call)
        kind = KINDS[call % len(KINDS)]
        parts = [part(seed, call, mine, to, counts[mine, to], kind) for to in range(size)]
        come = peers.channel("ids").exchange([part.view(np.uint8) for part in parts], f"call {call}")
        said.append(digest([theirs.view(kind).tolist() for theirs in come]))
        rows = np.concatenate([part(seed, call, mine, to, 3 * counts[mine, to]) for to in range(size)])
        send = torch.from_numpy(rows).view(-1, 3)
        begun = peers.channel("rows").begin_swap(send, counts[mine], counts[:, mine])
        piece = torch.from_numpy(part(seed, call, mine, size, 5))
        outs = [torch.zeros(5) for _ in range(size)]
        outs[mine] = piece
        peers.channel("dense").begin_swap_parts([piece] * size, outs).wait()
        said.append(digest([x for out in outs for x in out.tolist()]))
        said.append(digest(begun.wait().tolist()))
    return said


def expected(rank: int, size: int, seed: int, calls: int = 6) -> list[str]:
    """Return the digests that a rank should get, worked out from what all ranks send."""
    said = []
    for call in range(calls):
        counts, kind = drawn(size, seed, call)[:, rank], KINDS[call % len(KINDS)]
        come = [part(seed, call, of, rank, counts[of], kind) for of in range(size)]
        said.append(digest([theirs.tolist() for theirs in come]))
        said.append(digest([x for of in range(size) for x in part(seed, call, of, size, 5).tolist()]))
        said.append(digest([row.tolist() for of in range(size)
                            for row in part(seed, call, of, rank, 3 * counts[of]).reshape(-1, 3)]))  # fmt: skip
    return said


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]
