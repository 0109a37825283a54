"""The SQL that the docs give for a warehouse, run by DuckDB: its sessions equal those of a plain sort."""

import re
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skirl.data.flags import DataFlags
from tests.dedup.test_by_session import WANTED, expected, made

HOWTO = Path(__file__).parents[2] / "docs/howto/sessions.md"
SCHEMA = """
session = "session"
time = "time"
[[label]]
name = "click"
[[id]]
name = "item"
type = "int"
[[id]]
name = "seen"
type = "int"
list = true
"""


def test_the_sql_of_the_docs_makes_sessions_and_their_factor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import duckdb

    section = HOWTO.read_text().split("## Out of a warehouse")[1]
    statements = re.findall(r"```text\n(.*?)```", section, re.S)
    assert [each.split()[0] for each in statements] == ["CREATE", "SELECT", "COPY"]
    rows = [row | {"visit": row["user"], "when": 600 * row["when"] + k % 600} for k, row in enumerate(made(900, 20))]
    monkeypatch.chdir(tmp_path)
    connection = duckdb.connect()
    connection.register("given", pa.Table.from_pylist([row | {"time": row["when"]} for row in rows]))
    connection.execute("CREATE TABLE clicks AS SELECT * FROM given")
    connection.execute(statements[0])
    [[factor]] = connection.execute(statements[1]).fetchall()
    connection.execute(statements[2])
    table = pq.read_table("visits.parquet").to_pylist()

    wanted = expected(rows, replace(WANTED, user="user", gap="1800s"))
    found = defaultdict(list)
    for row in sorted(table, key=lambda row: (row["time"], row["price"])):
        found[row["session"]].append(row)
    assert Counter(tuple(row["price"] for row in own) for own in found.values()) == wanted
    differ = sum(1 for own in found.values() for k, row in enumerate(own) if not k or row["seen"] != own[k - 1]["seen"])
    assert factor == pytest.approx(len(rows) / differ) and factor > 1.05

    order = [(row["time"] // 86400, row["user"], row["time"]) for row in table]
    assert order == sorted(order) and order[-1][0] > 1
    Path("schema.toml").write_text(SCHEMA)
    stream = DataFlags("parquet:visits.parquet", schema="schema.toml", batch=900, rows="1000", repeats="find").stream()
    [batch] = stream
    lists = batch.sparse.stride_per_key()[1]
    assert batch.sparse.stride() == 900 and lists < 900
