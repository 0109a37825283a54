"""A vocabulary: how it is counted, which row each value of a column has, and the values of rows."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from skirl.data.files.hashing import BY_HASH, BY_OPEN, numbers_of, seed_of
from skirl.data.files.schema import FileSchema
from skirl.tools.hash_index import HashIndex
from skirl.tools.os_errors import replacing, writing
from skirl.tools.progress import progress_of
from skirl.tools.sealed_json import ANY, COUNT, TEXT, misfit

if TYPE_CHECKING:
    from skirl.data.files.stream import Files


def keyed(fingerprints: np.ndarray) -> np.ndarray:
    """Return fingerprints as keys of a HashIndex. 0, a missing value, becomes EMPTY: what is found for it means nothing."""
    return (np.asarray(fingerprints) - np.uint64(1)).view(np.int64)


VERSION = 1
FIRST = 2
"""Row of the most frequent id. Row 0 is for missing values, row 1 for all other ids."""
MOST = (1 << 31) - FIRST


class BadVocabulary(ValueError):
    """A vocabulary file is damaged, or was made for another schema."""


def _bad(path: str, what: str) -> BadVocabulary:
    return BadVocabulary(f"vocabulary {path}{what if what.startswith(' is ') else f': {what}'}")


@dataclass
class Vocabulary:
    """Maps fingerprints to rows; made by `load`."""

    path: str
    types: dict[str, str]
    """How the values of each table were read, which decides their fingerprints; "" if a converted file did not say."""
    min_count: int
    samples: int
    tables: dict[str, HashIndex] = field(repr=False)
    rows: dict[str, int]
    checksum: str
    """First 16 digits of the SHA-256 of the fingerprints in order."""

    @property
    def described(self) -> str:
        return f"by a vocabulary of {sum(self.rows.values()):,} rows with checksum {self.checksum}"

    def __getstate__(self) -> dict[str, Any]:  # it may be gigabytes, so a worker reads the file itself
        return {"path": self.path, "checksum": self.checksum}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(load(state["path"]).__dict__)
        if self.checksum != state["checksum"]:
            raise _bad(self.path, "it was changed since the run opened it: put it back as it was")

    def __call__(self, table: str, fingerprints: np.ndarray) -> np.ndarray:
        """Return the row of each fingerprint: 0 for a missing value, 1 for one without a row of its own (int32)."""
        out = self.tables[table].get(keyed(fingerprints))
        out[out < 0] = 1
        out[fingerprints == 0] = 0
        return out

    def check(self, schema: FileSchema) -> None:
        for table, kind in schema.kinds.items():
            if table not in self.rows:
                raise _bad(self.path, f"it has no table {table!r}: make it again with this schema")
            stored = self.types[table]
            if stored and kind and stored != kind:  # a converted file records how its values were read
                raise _bad(self.path, f"its ids of {table!r} are {stored}, not {kind}: make it again with this data")
        for column in schema.ids:
            if column.encode == "row" and (table := column.table or column.name) in self.rows:
                found = f"it has ids of {table!r}, which is a row in this data already"
                raise _bad(self.path, f"{found}: make it again with this data")


def save(path: str, types: Mapping[str, str], min_count: int, samples: int, tables: Mapping[str, np.ndarray]) -> None:
    facts = {"types": dict(types), "min_count": min_count, "samples": samples, "version": VERSION}
    arrays = {f"{table}.keys": np.ascontiguousarray(keys, np.uint64) for table, keys in tables.items()}
    with replacing(path) as draft, writing(path):
        save_file(arrays, draft, metadata={"skirl": json.dumps(facts)})


def load(path: str) -> Vocabulary:
    try:
        with safe_open(path, "numpy") as file:
            types, min_count, samples = facts_of(path, (file.metadata() or {}).get("skirl"))
            for table in types:
                part = file.get_slice(f"{table}.keys")
                shape = part.get_shape()
                if part.get_dtype() != "U64" or len(shape) != 1 or shape[0] > MOST:
                    raise _bad(path, f"{table}.keys is not a list of uint64: make it again")
            keys = {table: file.get_tensor(f"{table}.keys") for table in types}
    except (OSError, SafetensorError, UnicodeEncodeError) as error:
        missing = isinstance(error, FileNotFoundError)
        problem = "there is no such file" if missing else f" is not a vocabulary, or is damaged ({error})"
        raise _bad(path, f"{problem}: set vocab to one that `skirl vocab` made") from None
    tables, checksum = {}, sha256()
    for table, array in sorted(keys.items()):
        if not array.all():
            raise _bad(path, f"{table}.keys has a 0, which is not a fingerprint: make it again")
        tables[table] = HashIndex()
        if tables[table].put(keyed(array), np.arange(FIRST, FIRST + len(array), dtype=np.int32)).any():
            raise _bad(path, f"{table}.keys has a fingerprint twice: make it again")
        checksum.update(f"{table} {len(array)}".encode())
        checksum.update(np.ascontiguousarray(array).data)
    rows = {table: len(array) + FIRST for table, array in keys.items()}
    return Vocabulary(path, types, min_count, samples, tables, rows, checksum.hexdigest()[:16])


_FORM = {"types": {...: TEXT}, "min_count": COUNT, "samples": COUNT}


def facts_of(path: str, text: str | None) -> tuple[dict[str, str], int, int]:
    """Return `types`, `min_count` and `samples`."""
    try:
        read = json.loads(text or "")
        wrong = misfit(read, {"version": ANY})
    except (ValueError, RecursionError) as error:
        read, wrong = {}, repr(error)
    if wrong is None and read["version"] != VERSION:
        raise _bad(path, f" is of version {read['version']!r}, this skirl reads {VERSION}: make it again")
    if wrong := wrong or misfit(read, _FORM):
        raise _bad(path, f"it does not say what it is ({wrong}): make it with `skirl vocab`")
    return read["types"], read["min_count"], read["samples"]


Counted = tuple[np.ndarray, np.ndarray]
"""Fingerprints, each once in ascending order, and how often each occurred (uint64)."""
_AT_ONCE = 1 << 20  # fingerprints to sort at a time, at least


def count(files: "Files", out: str, min_count: int) -> dict[str, Any]:
    """Make a vocabulary in one pass over files whose ids are read as fingerprints."""
    columns = files.encoder.schema
    types = columns.kinds
    hashed = [(column.table or column.name, k) for k, column in enumerate(columns.ids) if column.encode == "hash"]
    samples, counts = 0, {table: Counts() for table in types}
    with progress_of("count") as progress:
        for number, piece in enumerate(files.pieces(), start=1):
            for table, k in hashed:
                counts[table].add(piece.ids[k].expanded().values.view(np.uint64))
            samples += len(piece)
            facts = {"samples": f"{samples:,}"}
            progress(number, lambda facts=facts: facts)
    distinct = {table: len(of.counted()[0]) for table, of in counts.items()}
    kept = {table: _kept(table, of.counted(), min_count) for table, of in counts.items()}
    save(out, types, min_count, samples, kept)
    return {
        "samples": samples, "bad_rows_skipped": files.bad_rows, "distinct": distinct,
        "rows": {table: len(keys) + FIRST for table, keys in kept.items()},
    }  # fmt: skip


def _kept(table: str, counted: Counted, min_count: int) -> np.ndarray:
    """The fingerprints that occur often enough, the most frequent first (ties by fingerprint)."""
    keys, times = (array[counted[1] >= min_count] for array in counted)
    if len(keys) > MOST:
        raise ValueError(f"table {table!r} would have {len(keys):,} rows, more than 2**31: set a larger min_count")
    return keys[np.lexsort((keys, np.iinfo(np.int64).max - times.astype(np.int64)))]


class Counts:
    """Exact counts of a table's fingerprints: 16 bytes for each distinct one, and three times that while it merges."""

    def __init__(self) -> None:
        none = np.empty(0, np.uint64)
        self._counted: Counted = none, none
        self._new: list[np.ndarray] = []
        self._waiting = 0

    def add(self, fingerprints: np.ndarray) -> None:
        """0 is not counted."""
        self._new.append(fingerprints[fingerprints != 0])
        self._waiting += len(self._new[-1])
        if self._waiting > max(_AT_ONCE, len(self._counted[0])):  # so that merging takes its share of the time, no more
            self.counted()

    def counted(self) -> Counted:
        if self._new:
            new = np.unique(np.concatenate(self._new), return_counts=True)
            keys, times = (np.concatenate([old, of.astype(np.uint64)]) for old, of in zip(self._counted, new))
            order = np.argsort(keys, kind="stable")  # merges stretches that are sorted
            keys, times = keys[order], times[order]
            first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)])
            self._counted = keys[first], np.add.reduceat(times, first) if len(first) else times
            self._new, self._waiting = [], 0
        return self._counted


def stream_of(state: Any) -> Mapping[str, Any] | None:
    """What a loader's state says of its files; None if it is not of files, or was taken before the first batch."""
    files = state.get("files", state) if isinstance(state, dict) else {}
    stream = files.get("stream") if isinstance(files, dict) else None
    return stream if isinstance(stream, dict) and "rows_of" in stream else None


@dataclass(frozen=True)
class Origins:
    """The meaning of each table's rows: which id, or group of ids, each one belongs to."""

    schema: FileSchema
    how: str
    """How ids become rows, as recorded in a state."""
    admitted: Mapping[str, np.ndarray]
    """With an open vocabulary: the fingerprint of each row given, from row 2 on, by table."""

    @classmethod
    def of(cls, state: Any) -> Self | None:
        if (stream := stream_of(state)) is None:
            return None
        admitted = {t: np.asarray(part, np.int64).view(np.uint64) for t, part in state.get("admitted", {}).items()}
        return cls(FileSchema.parse(stream["schema"]), str(stream["rows_of"]), admitted)

    def of_rows(self, table: str, rows: np.ndarray) -> tuple[list[str], list[str | None], np.ndarray]:
        """What each row is, its id as text (None if unknown), and its id's fingerprint (0 if unknown).

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
