"""Blocks: pairs of buffers with owners, in limited number."""

import pytest
import torch

from skirl.engine.device.transfers import Blocks, no_streams


class Event:
    def __init__(self):
        self.waited = 0

    def synchronize(self):
        self.waited += 1


def make(most=1 << 20, kept=1 << 30):
    return Blocks(torch.device("cpu"), no_streams().here, most, kept)


def test_memory_beyond_the_bound_is_let_go_of_once_nothing_uses_it():
    blocks = make(most=100_000)
    taken = [blocks.take(40_000) for _ in range(5)]
    assert blocks.nbytes >= 200_000
    events = []
    for block in taken:
        block.copied, block.used = Event(), Event()
        events.append((block.copied, block.used))
        blocks.release(block)
    assert blocks.nbytes <= 100_000 and not blocks.in_use
    dropped = sum(copied.waited == used.waited == 1 for copied, used in events)
    assert dropped == 5 - blocks.nbytes // taken[0].host.numel()


def test_a_device_without_memory_says_what_to_set(monkeypatch):
    def empty(size, *, device, **_):
        if device != "cpu":
            raise torch.OutOfMemoryError
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(MemoryError, match=r"could not allocate 10 KiB on .*: set cache or prefetch to less"):
        make().take(10_000)
