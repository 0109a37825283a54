"""The plan of files depends on the rows, not their order. Where sessions begin does not depend on later rows."""

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.dedup import plan as plans
from skirl.dedup.order import SessionStarts, groups_of_rows
from skirl.dedup.plan import Counts, highs_of
from skirl.dedup.spill import HELD
from tests.cases import cases


def rows_of(seed: int, rows: int, partitions: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw partitions, first halves of hashes, and sizes."""
    draw = np.random.default_rng(seed)
    highs = draw.integers(0, 1 << 63, rows).astype(np.uint64) * np.uint64(2)
    return draw.integers(-partitions, partitions, rows), highs, draw.integers(1, 900, rows)


@given(seed=st.integers(0, 99), rows=st.integers(1, 400), partitions=st.integers(1, 40), load=st.integers(1, 400))
@cases(30)
def test_a_plan_holds_each_row_once_and_does_not_depend_on_loads(
    seed: int, rows: int, partitions: int, load: int
) -> None:
    of, highs, sizes = rows_of(seed, rows, partitions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "CELLS", 1024)
        patch.setattr(plans, "MOST", 256)
        whole, parts = Counts(), Counts()
        whole.hold(of, highs, 1, sizes)
        for low in np.random.default_rng(seed).permutation(np.arange(0, rows, load)).tolist():
            parts.hold(
                of[low : low + load],
                highs[low : low + load],
                np.ones(min(load, rows - low), int),
                sizes[low : low + load],
            )
        unit = 9 * int(sizes.max() + HELD)
        plan = whole.planned(unit)
    assert plan == parts.planned(unit) and plan["units"] == sorted(plan["units"])
    assert plan["buckets"] * len(set(of.tolist())) <= 1024 and whole.bytes == sizes.sum() + HELD * rows
    seen = np.zeros(rows, int)
    for (partition, first, end), count, held in zip(
        *(plan[f"unit{of}"] for of in ("s", "_rows", "_bytes")), strict=True
    ):
        low, high = highs_of(first, end, plan["buckets"])
        own = (of == partition) & (highs >= np.uint64(low)) & (highs <= np.uint64(high))
        seen += own
        assert own.sum() == count > 0
        assert held == (sizes[own] + HELD).sum() and (held <= unit or end == first + 1)
    assert seen.tolist() == [1] * rows


def sessions(rows: list[tuple[int, int, int]], gap: float, longest: int) -> tuple[list[bool], list[int]]:
    """Return where sessions begin, and how many there are, are cut at borders, and are cut for their length: row by row."""
    new: list[bool] = []
    uncut, pieces = -1, -1
    borders, long = set(), set()
    for k, (user, time, part) in enumerate(rows):
        before = rows[k - 1] if k else None
        begins = before is None or before[0] != user or time - before[1] > gap
        border = not begins and before is not None and before[2] != part
        uncut, pieces = uncut + begins, pieces + (begins or border)
        if border:
            borders.add(uncut)
        length = next((n for n, b in enumerate(reversed(new), 1) if b), 0)
        cut = not begins and not border and length == longest
        if cut:
            long.add(pieces)
        new.append(begins or border or cut)
    return new, [sum(new), len(borders), len(long)]


@given(st.data())
@cases(40)
def test_sessions_begin_alike_however_rows_come(data: Any) -> None:
    draw = random.Random(data.draw(st.integers(0, 99)))
    rows = sorted((draw.randrange(4), t := draw.randrange(60), t // 15) for _ in range(draw.randrange(1, 80)))
    gap, longest = data.draw(st.sampled_from([None, 3.0])), data.draw(st.integers(1, 9))
    expected = sessions(rows, np.inf if gap is None else gap, longest)
    starts, found = SessionStarts(gap, longest), []
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4))), len(rows)]
    for low, high in pairwise(cuts):
        own = np.array(rows[low:high], np.int64).reshape(-1, 3)
        hashes = np.stack([own[:, 0], own[:, 0] * 7], axis=1).astype(np.uint64)
        found += starts.begun(hashes, own[:, 1].astype(float), np.ascontiguousarray(own[:, 2])).tolist()
    assert (found, list(starts.counts.values())) == expected


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=60),
    st.integers(1, 8),
    st.integers(5, 40),
)
@cases(40)
def test_row_groups_are_cut_alike_however_rows_come(rows: list[tuple[bool, int]], most: int, most_bytes: int) -> None:
    new, sizes = np.array([b for b, _ in rows]), np.array([size for _, size in rows])
    new[0] = True
    whole = groups_of_rows(new, most, sizes, most_bytes)
    for low, high in pairwise(whole):
        assert sizes[low:high].sum() <= most_bytes or high == low + 1
        assert high - low <= most or not new[low + 1 : high].any()
        assert high == len(rows) or new[high] or sizes[low : high + 1].sum() > most_bytes
    begin, cuts = 0, [0]
    for end in range(1, len(rows) + 1):  # rows that came, except those of complete groups
        own = groups_of_rows(new[begin:end], most, sizes[begin:end], most_bytes)
        cuts += [begin + cut for cut in own[1:-1]]
        begin = cuts[-1]
    assert [*cuts, len(rows)] == whole
