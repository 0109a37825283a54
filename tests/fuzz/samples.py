"""Files read in several ways, which have to agree: whole and in parts, malformed rows refused and left out."""

import math
from pathlib import Path
from typing import Any

from skirl.data import DataFlags
from skirl.data.files.find import BadFile, BadRow, BadSchema
from tests.fuzz.target import READ, REFUSED, Target, clean

ERRORS = (BadFile, BadRow, BadSchema)
ROWS = 1000
PARTS = (1 << 21, 300)
"""Bytes of text read at a time."""

Sample = tuple[list[float], list[float], dict[str, list[int]]]
"""Labels, dense features, and the rows of each id feature."""


def samples_of(files: Any) -> list[Sample]:
    """Read files to their end, and return their samples, of which each is sound."""
    rows = {name: table.rows for table in files.tables(1) for name in table.features}
    found: list[Sample] = []
    for batch in files:
        n, keys = len(batch.labels), batch.sparse.keys()
        groups = {name: of.tolist() for names, of in batch.sparse.groups.items() for name in names}
        bags, values = {}, batch.sparse.values().tolist()
        lengths, begin = iter(batch.sparse.lengths().tolist()), 0
        for name, stride in zip(keys, batch.sparse.stride_per_key(), strict=True):
            bags[name] = []
            for _ in range(stride):
                end = begin + next(lengths)
                bags[name].append(values[begin:end])
                begin = end
        assert begin == len(values) and next(lengths, None) is None
        labels, dense = batch.labels.reshape(n, -1).tolist(), batch.dense.tolist()
        for i in range(n):
            ids = {name: of[groups[name][i] if name in groups else i] for name, of in bags.items()}
            assert all(math.isfinite(x) for x in (*labels[i], *dense[i]))
            assert all(0 <= row < rows[name] for name, of in ids.items() for row in of)
            found.append((labels[i], dense[i], ids))
    return found


class OfFile(Target):
    """A data file, which has to be read the same in all ways. Any error names it."""

    kind = "parquet"
    rows: str | None = str(ROWS)

    def judge(self, folder: Path) -> str:
        return judged_files(f"{self.kind}:{folder / 'file'}", folder, self.rows)


def judged_files(data: str, folder: Path, rows: str | None) -> str:
    flags = {"schema": str(folder / "schema.toml")} if (folder / "schema.toml").exists() else {}
    found: dict[tuple[str, int], tuple[list[Sample] | None, int]] = {}
    for bad_rows in ("refuse", "skip"):
        for part in PARTS:
            try:
                files = DataFlags(data, rows=rows, bad_rows=bad_rows, batch=7, **flags).files(part)
                found[bad_rows, part] = samples_of(files), files.bad_rows
            except ValueError as error:
                found[bad_rows, part] = None, 0
                if "there are no rows left to read" not in str(error):
                    clean(error, folder, *ERRORS)
    for bad_rows, part in found:
        assert found[bad_rows, part] == found[bad_rows, PARTS[0]], "read otherwise in parts"
    refuse, skip = (found[bad_rows, PARTS[0]] for bad_rows in ("refuse", "skip"))
    assert refuse[0] is None or refuse == skip == (refuse[0], 0), "a malformed row was read"
    return REFUSED if skip[0] is None else READ
