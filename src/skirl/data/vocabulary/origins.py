"""Finds the id that a row belongs to, from the state of a stream of files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from skirl.data.files.hashing import BY_HASH, BY_OPEN, numbers_of, seed_of
from skirl.data.files.schema import FileSchema
from skirl.data.vocabulary.vocabulary import FIRST


@dataclass(frozen=True)
class Origins:
    """The meaning of each table's rows: which id, or group of ids, each one belongs to.

    >>> schema = '[[label]]\\nname = "y"\\n[[id]]\\nname = "item"\\ntype = "hex"\\nrows = 50'
    >>> stream = {"schema": schema, "rows_of": BY_OPEN}
    >>> state = {"files": {"stream": stream}, "tables": {}, "admitted": {"item": np.arange(1, 3)}}
    >>> origins = Origins.of(state)
    >>> what, ids, fingerprints = origins.of_rows("item", np.array([0, 1, 3, 4]))
    >>> what, fingerprints.tolist()
    (['missing', 'other', 'id', 'free'], [0, 0, 2, 0])
    """

    schema: FileSchema
    how: str
    """How ids become rows, as recorded in a state."""
    admitted: Mapping[str, np.ndarray]
    """With an open vocabulary: the fingerprint of each row given, from row 2 on, by table."""

    @classmethod
    def of(cls, state: Any) -> Self | None:
        """Read a loader's state. Return None if it is not of files, or was taken before the first batch."""
        if not isinstance(state, dict):
            return None
        files = state["files"] if "admitted" in state else state
        stream = files.get("stream")
        if not isinstance(stream, dict) or not isinstance(stream.get("schema"), str):
            return None
        admitted = {t: np.asarray(part, np.int64).view(np.uint64) for t, part in state.get("admitted", {}).items()}
        return cls(FileSchema.parse(stream["schema"]), str(stream["rows_of"]), admitted)

    def of_rows(self, table: str, rows: np.ndarray) -> tuple[list[str], list[str | None], np.ndarray]:
        """Return what each row is, its id as text (None if unknown), and its id's fingerprint (0 if unknown).

        A row is one of: id, which belongs to one id; missing, for missing values; other, for all ids that were not admitted;
        free, not given to an id yet; row, where the value is the row itself; vocabulary or hashed, which belong to ids that
        the checkpoint does not contain.
        """
        kinds, prints = self.schema.kinds, np.zeros(len(rows), np.uint64)
        if table not in kinds:
            return ["row"] * len(rows), [str(row) for row in rows.tolist()], prints
        if self.how != BY_OPEN:
            rest = "hashed" if self.how == BY_HASH else "vocabulary"
            names = np.where(rows == 0, "missing", np.where((rows == 1) & (rest != "hashed"), "other", rest))
            return names.tolist(), [None] * len(rows), prints
        known = self.admitted[table]
        has = (rows >= FIRST) & (rows < FIRST + len(known))
        prints[has] = known[rows[has] - FIRST]
        names = np.where(has, "id", np.where(rows == 0, "missing", np.where(rows == 1, "other", "free")))
        texts: list[str | None] = [None] * len(rows)
        if kinds[table] in ("hex", "numbers"):
            numbers = numbers_of(prints, seed_of(table))
            shown = numbers.view(np.uint64).tolist() if kinds[table] == "hex" else numbers.tolist()
            digits = "x" if kinds[table] == "hex" else "d"
            texts = [format(number, digits) if known else None for number, known in zip(shown, has.tolist())]
        return names.tolist(), texts, prints
