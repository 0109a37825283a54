"""Sessions shuffled in chunks: each row comes once an epoch, chunks are as promised, and any reader gets the same rows."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.core.batch import Batch
from skirl.data.files.stream import Files
from skirl.data.flags import DataFlags
from tests.cases import cases

SCHEMA = """
session = "visit"
[[label]]
name = "click"
[[dense]]
name = "row"
[[id]]
name = "item"
type = "int"
"""


def drawn(n: int, longest: int, seed: int) -> list[int]:
    """Draw the session of each of n rows; a session may come back later."""
    draw, sessions = random.Random(seed), list[int]()
    while len(sessions) < n:
        sessions += [draw.randrange(n)] * draw.randint(1, longest)
    return sessions[:n]


def written(folder: Path, sessions: Sequence[int], group: int = 40, files: int = 1) -> str:
    """Write numbered rows to files of several parts, and return their --data flag."""
    (folder / "schema.toml").write_text(SCHEMA)
    for number, rows in enumerate(np.array_split(np.arange(len(sessions)), files)):
        visits, clicks = [f"v{sessions[row]}" for row in rows], np.zeros(len(rows), np.int8)
        table = {"click": clicks, "row": rows.astype(np.float32), "item": rows % 7, "visit": visits}
        pq.write_table(pa.table(table), folder / f"rows-{number}.parquet", row_group_size=group)
    return f"parquet:{folder}/rows-*.parquet"


def opened(data: str, **flags: Any) -> Files:
    schema = str(Path(data.partition(":")[2]).parent / "schema.toml")
    return DataFlags(data, **{"schema": schema, "batch": 8, "session_order": "shuffle", "shuffle": 72, **flags}).files()


def rows_of(batches: Sequence[Batch]) -> list[int]:
    return [int(row) for batch in batches for row in batch.dense[:, 0].tolist()]


def plain_chunks(sessions: Sequence[int], low: int, high: int) -> set[tuple[int, ...]]:
    """Return the chunks of a window, found row by row."""
    chunks: list[list[int]] = []
    for row in range(low, high):
        goes_on = chunks and sessions[chunks[-1][-1]] == sessions[row] and len(chunks[-1]) < 8
        if goes_on:
            chunks[-1].append(row)
        else:
            chunks.append([row])
    return {tuple(chunk) for chunk in chunks}


@given(
    n=st.integers(1, 200), longest=st.integers(1, 30),
    mix=st.integers(1, 250), batch=st.sampled_from([1, 7, 64]), seed=st.integers(0, 9),
)  # fmt: skip
@cases(12)
def test_chunks_of_a_window_change_places_and_nothing_else(
    tmp_path_factory: Any, n: int, longest: int, mix: int, batch: int, seed: int
) -> None:
    sessions = drawn(n, longest, seed)
    data = written(tmp_path_factory.mktemp("order"), sessions, files=min(n, 2))
    batches = list(opened(data, shuffle=mix, batch=batch, seed=seed))
    assert [len(b.labels) for b in batches] == [batch] * (n // batch) + ([n % batch] if n % batch else [])
    rows = rows_of(batches)
    size = -(-mix // batch) * batch
    for low in range(0, n, size):
        left = plain_chunks(sessions, low, min(low + size, n))
        at = low
        while left:  # each chunk comes whole and in order, one after another
            chunk = next((c for c in left if c[0] == rows[at]), None)
            assert chunk is not None and rows[at : at + len(chunk)] == list(chunk)
            left.remove(chunk)
            at += len(chunk)
        assert at == min(low + size, n)


def test_a_state_is_a_few_numbers_and_goes_on_at_its_step(tmp_path: Path) -> None:
    data = written(tmp_path, drawn(300, 20, 2), group=33, files=3)
    flags: dict[str, Any] = {"epochs": 2}
    files = opened(data, **flags)
    batches, states = list[Batch](), [files.state_dict()]
    for batch in files:
        batches.append(batch)
        states.append(files.state_dict())
    assert len(batches) == 76
    for taken in (1, 10, 38, 75):
        assert all(isinstance(v, int) for k, v in states[taken].items() if k != "stream")
        other = opened(data, **flags)
        other.load_state_dict(states[taken])
        assert rows_of(list(other)) == rows_of(batches[taken:]), taken


def test_workers_and_trainers_change_nothing(tmp_path: Path) -> None:
    data = written(tmp_path, drawn(250, 20, 3), group=30, files=2)
    flags: dict[str, Any] = {"shuffle": 90, "epochs": 2}
    alone = list(opened(data, **flags))
    assert rows_of(list(opened(data, workers=3, **flags))) == rows_of(alone)
    halves = [list(opened(data, **flags).sharded(rank, rank + 1, 2)) for rank in range(2)]
    whole = [batch for batch in alone if len(batch.labels) == 8]
    assert [rows_of(pair) for pair in zip(*halves, strict=True)] == [rows_of([batch]) for batch in whole]


def test_what_is_held_out_stays_in_order(tmp_path: Path) -> None:
    files = opened(written(tmp_path, drawn(200, 10, 5)), valid="25%")
    assert files.held_out is not None and rows_of(list(files.held_out)) == list(range(150, 200))
    assert sorted(rows_of(list(files))) == list(range(150)) != rows_of(list(files))


def test_a_row_without_a_session_is_malformed(tmp_path: Path) -> None:
    data = written(tmp_path, [1, 1, 2, 2])
    table = pq.read_table(tmp_path / "rows-0.parquet")
    table = table.set_column(3, "visit", pa.array(["v1", None, "v2", "v2"]))
    pq.write_table(table, tmp_path / "rows-0.parquet")
    with pytest.raises(ValueError, match=r"row 2 of row group 1.*session column visit is nothing.*a value in each row"):
        list(opened(data))
    assert sorted(rows_of(list(opened(data, bad_rows="skip")))) == [0, 2, 3]
    assert sorted(rows_of(list(opened(data, session_order="keep")))) == [0, 1, 2, 3], "who keeps the order reads none"
