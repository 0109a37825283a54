"""The pipeline's three clocks, compared with a simulation that ticks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skirl.sizing.advice import overlap, step_that_hides
from skirl.tools.units import Link
from tests.cases import cases

BYTES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12)


def ticking(read: list[int], written: list[int], step: int, prefetch: int) -> int:
    """Simulate one byte per tick in each direction: every stage that can work does, until all is done."""
    left_in, left_out, left_step = list(read), list(written), [step] * len(read)
    now = 0
    while any(left_in) or any(left_out) or any(left_step):
        reached = sum(left == 0 for left in left_step)  # the step that the loop has reached
        waiting = next((t for t, left in enumerate(left_in) if left), None)
        can_read = waiting is not None and waiting - prefetch <= reached
        can_compute = reached < len(read) and not any(left_in[: reached + 1])
        leaving = next((t for t, left in enumerate(left_out) if left), None)
        can_write = leaving is not None and leaving <= reached
        if can_read:
            left_in[waiting] -= 1
        if can_write:
            left_out[leaving] -= 1
        if can_compute:
            left_step[reached] -= 1
        now += 1
    return now


@cases(150)
@given(moved=BYTES, step=st.integers(1, 6), prefetch=st.integers(0, 4))
def test_equals_a_pipeline_that_ticks(moved, step, prefetch):
    read, written = [r for r, _ in moved], [w for _, w in moved]
    run = overlap(read, written, step, Link(rate=1.0), prefetch)
    assert run.together == ticking(read, written, step, prefetch)
    assert run.serial == step * len(moved) + sum(read) + sum(written)
    assert run.roof == max(step * len(moved), sum(read), sum(written))
    assert run.roof <= run.together <= run.serial


def test_what_keeps_up():
    link = Link(rate=100.0, delay=0.5)
    assert step_that_hides(np.array([0, 0, 100, 300]), np.array([0, 0, 0, 100]), link) == 0.5 + 2.0
