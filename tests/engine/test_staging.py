"""Staging: every buffer has one user and comes back with its last owner, and their total is bounded."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skirl.engine.buffers import Staging
from tests.cases import cases

WIDTH = 4


def make(most=1 << 20):
    return Staging(WIDTH, np.dtype(np.float32), most)


def test_a_small_need_does_not_hold_a_large_buffer():
    staging = make()
    large = staging.of(100_000)
    staging.release(large)
    assert staging.of(10) is not large


def test_reset_forgets_buffers_that_somebody_may_still_write_to():
    staging = make()
    buffer = staging.of(5000)
    staging.reset()
    assert staging.nbytes == staging.in_use == 0
    assert staging.of(5000) is not buffer


@cases(100)
@given(st.lists(st.tuples(st.sampled_from(["take", "retain", "release"]), st.integers(0, 6000)), max_size=60))
def test_buffers_are_never_shared_and_sizes_add_up(actions):
    staging = make(most=8000 * WIDTH * 4)
    owned = []
    for action, number in actions:
        if action == "take":
            buffer = staging.of(number)
            assert buffer.rows.shape == (number, WIDTH)
            assert all(buffer is not other for other, _ in owned)
            owned.append((buffer, 1))
        elif owned:
            index = number % len(owned)
            buffer, owners = owned.pop(index)
            getattr(staging, action)(buffer)
            owners += 1 if action == "retain" else -1
            if owners:
                owned.append((buffer, owners))
        used = {id(buffer): buffer.size for buffer, _ in owned}
        assert staging.in_use == len(used)
        free = staging.nbytes - sum(used.values())
        assert free == sum(buffer.size for buffer in staging._free) >= 0
        assert not free or staging.nbytes <= 8000 * WIDTH * 4
        assert staging.nbytes <= max(8000 * WIDTH * 4, sum(used.values()))
