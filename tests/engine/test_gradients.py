"""Sums of gradients between trainers: several sums of a request."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skirl.core.tree import subtrees
from skirl.engine import rows as gradients
from skirl.oracle.step import Step
from tests.cases import cases

EMPTY: Any = np.empty(0, np.int64)


def step_of(rows: list[list[int]]) -> Step:
    """Return a step with the requests of each row."""
    sizes, count = [len(of) for of in rows], sum(map(len, rows))
    slots, order = np.empty(count, np.int32), [pos for of in rows for pos in of]
    for row, of in enumerate(rows):
        slots[of] = 10 * row
    return Step(
        number=0, slots=slots, keys=np.arange(len(rows)) + 100, rows=10 * np.arange(len(rows), dtype=np.int32),
        group_start=np.cumsum([0, *sizes]).astype(np.int32), group_pos=np.array(order, np.int32),
        evict_keys=EMPTY, evict_slots=EMPTY, fetch_keys=EMPTY, fetch_slots=EMPTY, fetch_after=-1, forward_step=EMPTY,
        forward_index=EMPTY, forward_slots=EMPTY, forward_keys=EMPTY, new_keys=EMPTY, new_slots=EMPTY, hold_from=0,
    )  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Draw the requests of each row, and the trainer of each request."""
    trainers, rows = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    asked = [sorted(draw(st.sets(st.integers(0, trainers - 1), min_size=1))) for _ in range(rows)]
    pairs = sorted((trainer, row) for row, of in enumerate(asked) for trainer in of)
    found = [[i for i, (_, r) in enumerate(pairs) if r == row] for row in range(rows)]
    return found, [trainer for trainer, _ in pairs]


@cases(200)
@given(case=requests(), data=st.data())
def test_several_sums_of_a_request(case: Any, data: st.DataObject) -> None:
    rows, trainer_of = case
    # Those of each trainer's first subtree come first, then those of the next.
    blocks = [subtrees(0, data.draw(st.sampled_from([1, 2, 3, 7]))) for _ in range(max(trainer_of) + 1)]
    serve = np.searchsorted(trainer_of, np.arange(len(blocks) + 1))
    come = [
        (pos, tree)
        for rank, trees in enumerate(blocks)
        for tree in range(len(trees))
        for pos in range(serve[rank], serve[rank + 1])
    ]
    spread = gradients._spread(step_of(rows), serve, blocks)
    for n, of in enumerate(rows):
        sums = [come[pos] for pos in spread.group_pos[spread.group_start[n] : spread.group_start[n + 1]]]
        assert sums == [(pos, tree) for pos in of for tree in range(len(blocks[trainer_of[pos]]))]
