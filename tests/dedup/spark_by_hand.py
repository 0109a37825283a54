"""The parts of a SparkSession that `skirl convert` uses, in one process: feeds single partitions in batches of any size."""

import operator
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

Row = dict[str, Any]


class Column:
    """A value that a function computes from a row."""

    def __init__(self, of: Callable[[Row], Any]) -> None:
        self.of = of

    def _with(self, other: "Column", how: Callable[[Any, Any], Any]) -> "Column":
        return Column(lambda row: how(self.of(row), other.of(row)))

    def __eq__(self, other: "Column") -> "Column":  # type: ignore[override]
        return self._with(other, operator.eq)

    def __ge__(self, other: "Column") -> "Column":
        return self._with(other, operator.ge)

    def __lt__(self, other: "Column") -> "Column":
        return self._with(other, operator.lt)

    def __and__(self, other: "Column") -> "Column":
        return self._with(other, operator.and_)


class Frame:
    """Rows in partitions."""

    def __init__(self, session: "Session", made: Callable[[], list[list[Row]]]) -> None:
        self._session, self._made = session, made

    def _of(self, change: Callable[[list[list[Row]]], list[list[Row]]]) -> "Frame":
        return Frame(self._session, lambda: change(self._made()))

    def __getitem__(self, name: str) -> Column:
        return Column(lambda row: row[name])

    def mapInArrow(self, function: Callable[[Iterator[Any]], Iterator[Any]], schema: str) -> "Frame":
        return self._of(
            lambda parts: [
                [row for batch in function(self._session.batches(part)) for row in batch.to_pylist()] for part in parts
            ]
        )

    def select(self, *names: str) -> "Frame":
        return self._of(lambda parts: [[{name: row[name] for name in names} for row in part] for part in parts])

    def join(self, other: "Frame", on: Column) -> "Frame":
        return self._of(
            lambda parts: [
                [both for row in part for side in other._made() for each in side if on.of(both := {**row, **each})]
                for part in parts
            ]
        )

    def hint(self, what: str) -> "Frame":
        return self

    def repartition(self, count: int, name: str) -> "Frame":
        """Redistribute rows as a shuffle does: in any order."""

        def change(parts: list[list[Row]]) -> list[list[Row]]:
            rows = [row for part in parts for row in part]
            self._session.draw.shuffle(rows)
            return [[row for row in rows if row[name] % count == part] for part in range(count)]

        return self._of(change)

    def sortWithinPartitions(self, *names: str) -> "Frame":
        return self._of(lambda parts: [sorted(part, key=lambda row: [row[name] for name in names]) for part in parts])

    def collect(self) -> list[tuple[Any, ...]]:
        return [tuple(row.values()) for part in self._made() for row in part]

    @property
    def write(self) -> "Frame":
        return self

    def mode(self, how: str) -> "Frame":
        assert how == "overwrite"
        return self

    def options(self, **given: str) -> "Frame":
        return self

    def parquet(self, place: str) -> None:
        folder = Path(place.removeprefix("file://"))
        parts = self._made()
        folder.mkdir(exist_ok=True)
        (folder / "rows").write_bytes(pickle.dumps(parts))


class Session:
    """Mimics a SparkSession."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.conf, self.read = Conf(), Reader(self)

    def batches(self, rows: list[Row]) -> Iterator[Any]:
        """Yield rows as Arrow batches, cut anywhere."""
        while rows:
            few, rows = rows[: (size := self.draw.randrange(1, 9))], rows[size:]
            yield pa.RecordBatch.from_pylist(few)

    def range(self, begin: int, end: int, step: int, parts: int) -> Frame:
        numbers = list(range(begin, end, step))
        assert len(numbers) == parts
        self.draw.shuffle(numbers)
        return Frame(self, lambda: [[{"id": number}] for number in numbers])

    def createDataFrame(self, rows: list[tuple[Any, ...]], schema: str) -> Frame:
        names = [column.split()[0] for column in schema.split(", ")]
        return Frame(self, lambda: [[dict(zip(names, row, strict=True)) for row in rows]])


class Conf(dict[str, str]):
    """Settings."""

    def get(self, name: str, default: str = "as it was") -> str:  # type: ignore[override]
        return super().get(name, default)

    def set(self, name: str, value: str) -> None:
        self[name] = value


class Reader:
    """Reads files written before."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def parquet(self, place: str) -> Frame:
        path = Path(place.removeprefix("file://"), "rows")
        return Frame(self._session, lambda: pickle.loads(path.read_bytes()))
