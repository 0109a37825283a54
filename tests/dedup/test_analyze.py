"""`skirl analyze`: its figures against a plain count, and against what convert writes."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.cli import main
from skirl.cli.files import Analyze, Convert
from skirl.data.files.find import BadSchema
from skirl.dedup.analyze import Sample, figures_of
from skirl.dedup.sessions import with_keys
from tests.cases import cases
from tests.dedup.rows import schema, write


def asked(data: str, **flags: Any) -> dict[str, Any]:
    return Analyze(data, quiet=True, **flags).run()


@given(rows=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), max_size=4)), min_size=1))
@cases(60)
def test_a_column_is_counted_as_plainly(rows: list[tuple[bool, list[int]]]) -> None:
    rows = [(n == 0 or new, ids) for n, (new, ids) in enumerate(rows)]
    found = figures_of(pa.array([ids for _, ids in rows], pa.list_(pa.int64())), np.array([new for new, _ in rows]))
    own = [n for n in range(len(rows)) if rows[n][0] or rows[n][1] != rows[n - 1][1]]
    total, left = sum(len(ids) for _, ids in rows), max(1, sum(len(rows[n][1]) for n in own))
    assert found == {"ids": round(total / len(rows), 3), "factor": round(total / left, 3)}


def sessions(samples: int, change: float, per_session: float = 16.5) -> list[dict[str, Any]]:
    """Return rows in a random order. The list of a session changes with a probability from each row to the next."""
    draw, rows = random.Random(0), []
    while len(rows) < samples:
        visit, seen = len(rows), [draw.randrange(10_000) for _ in range(12)]
        for when in range(max(1, round(draw.uniform(0.5, 1.5) * per_session))):
            if draw.random() < change:
                seen = [draw.randrange(10_000) for _ in range(12)]
            row = {"click": 0, "price": 1.0, "item": draw.randrange(50), "seen": seen, "bought": [len(rows)]}
            rows.append(row | {"visit": visit, "when": when, "user": f"u{visit}"})
    draw.shuffle(rows)
    return rows


@pytest.mark.parametrize("way", ["all", "some", "users"])
def test_what_is_projected_is_what_convert_gives(tmp_path: Path, way: str) -> None:
    flags: dict[str, Any] = {"user": "user", "gap": "3s"} if way == "users" else {}
    data, by = write(tmp_path / "in.parquet", sessions(9000, 0.1)), schema(tmp_path)
    found = asked(data, schema=by, **flags, **({"memory": "1MiB"} if way == "some" else {}))
    assert (found["sampled"]["one_in"] > 1) == (way == "some")
    given = Convert(data, str(tmp_path / "out"), by="session", quiet=True, schema=by, **flags).run()
    table = pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / "out").iterdir())])
    assert found["samples"] == given["samples"] == len(table)
    assert found["sessions"] == pytest.approx(given["sessions"], rel=0 if way != "some" else 0.1)
    above, ids, held = [], 0, 0
    for row in table.column("seen").to_pylist():
        above, held = (above, held) if row is None else (row, held + len(row))
        ids += len(above)
    assert found["columns"]["seen"]["factor"] == pytest.approx(ids / held, rel=0.07)
    assert found["bytes"]["by session"] == pytest.approx(given["bytes"], rel=0.2)
    assert found["bytes"]["now"] == (tmp_path / "in.parquet").stat().st_size


def test_a_sample_has_whole_sessions_and_keeps_to_its_memory() -> None:
    draw = np.random.default_rng(1)
    sample, came = Sample(100_000), list[Any]()
    for _ in range(40):
        sessions = draw.integers(0, 300, 500)
        hashes = sessions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        came.append(with_keys(pa.table({"session": sessions}), hashes ^ (hashes >> np.uint64(32)), np.zeros(500)))
        sample.add(came[-1])
        assert sum(table.nbytes for table in sample._kept) <= 100_000
    every = np.concatenate([t.column("session").to_numpy() for t in came])
    kept = sample.kept().column("session").to_numpy()
    assert sample.rows == len(every) and sample.level > 1 and not sample.cut and len(kept) > 0
    assert sorted(kept) == sorted(every[np.isin(every, np.unique(kept))]), "of a session that is there, all rows are"
    assert len(np.unique(kept)) == pytest.approx(300 / 2**sample.level, rel=0.6)


@pytest.mark.parametrize(
    ("change", "per_session", "advice"),
    [(0.05, 16.5, "cluster"), (0.05, 1.2, "don't bother"), (1.0, 16.5, "don't bother")],
)
def test_verdicts(tmp_path: Path, change: float, per_session: float, advice: str) -> None:
    found = asked(write(tmp_path / "in.parquet", sessions(3000, change, per_session)), schema=schema(tmp_path))
    assert found["advice"] == advice and found["verdict"].startswith(advice)
    assert found["per_session"] == pytest.approx(per_session, rel=0.2)
    expected = per_session / (1 + (per_session - 1) * change)
    assert found["columns"]["seen"]["factor"] == pytest.approx(expected, rel=0.2)


def test_real_data(data_folder: Path) -> None:
    assert asked(f"mind:{data_folder / 'mind'}", memory="2MiB")["verdict"].startswith("cluster by session")
    for data in (f"criteo:{data_folder / 'criteo_first10k.tsv'}", f"avazu:{data_folder / 'avazu'}"):
        with pytest.raises(BadSchema, match="nothing says which rows are a session"):
            asked(data)


def test_bytes_that_are_no_rows_have_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "day_0").write_bytes(bytes(random.Random(0).choices(range(1, 256), k=50_000)))
    for kind in ("criteo", "avazu", "mind"):
        assert main(["analyze", f"{kind}:{tmp_path / 'day_0'}", "--user", "user", "--gap", "30m"]) == 1
        assert main(["analyze", f"{kind}:{tmp_path / 'day_0'}"]) == 1
