"""The request to `skirl convert --by session`, and the rows that it reads, with their sort keys."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from skirl.data.convert import converted, keeping, table_of
from skirl.data.files.columns import plain
from skirl.data.files.encode import Fingerprints
from skirl.data.files.encoded import Encoded
from skirl.data.files.errors import BadSchema
from skirl.data.files.stream import Files
from skirl.data.files.times import is_date, since_1970
from skirl.data.files.windows import cut
from skirl.dedup.finish import WrittenColumns, with_keys
from skirl.dedup.row_hash import session_hashes, time_bits
from skirl.tools.units import parse_seconds

BASE = 448 << 20
"""Bytes of a process that has read nothing yet: Python, torch, Arrow, kernels."""
SESSION = "session"
"""Name of the session column that is added if only users are known."""


@dataclass(frozen=True)
class Wanted:
    """A request to `skirl convert --by session`. The same request resumes an interrupted command.

    **Arguments**

    - `session`: the column that says which rows belong together; None for the schema's, or if `user` is given.
    - `user`: the column of users; a user's session ends after `gap` without a row.
    - `gap`: that length of time.
    - `partition`: a length of time whose borders no file crosses; None does not divide time.
    - `memory`: bytes of the whole process.
    - `layout`: "once" leaves out lists that equal the row above's; "window" writes lists that shift as windows of a buffer;
      "rows" leaves nothing out.
    - `compression`: compression of pages.
    - `as_rows`: write ids as rows of tables, not as fingerprints.
    """

    session: str | None
    user: str | None
    gap: str | None
    partition: str | None
    memory: int
    layout: str
    compression: str
    as_rows: bool

    @property
    def unit(self) -> int:
        """Bytes of rows to sort at once."""
        return max(1 << 16, (self.memory - BASE) // 6)

    @property
    def load(self) -> int:
        """Bytes of rows to read before they are sorted and spilled."""
        return max(1 << 16, (self.memory - BASE) // 8)

    @property
    def piece(self) -> int:
        """Approximate bytes of rows to decode at once."""
        return self.load // 2

    @property
    def frame(self) -> int:
        """Most bytes of a frame. Small, since rows in order are read back from a frame of each load at a time."""
        return max(1 << 12, self.load // 1024)


def shaped(files: Files, wanted: Wanted) -> tuple[Files, WrittenColumns]:
    """Return the files with the session and time columns kept, and what to write of them.

    **Arguments**

    - `files`: the rows.
    - `wanted`: how to write them.
    """
    schema = files.encoder.schema
    session = wanted.session or (None if wanted.user else schema.session)
    if session is None and wanted.user is None:
        raise BadSchema(
            "nothing says which rows are a session: set session to the column that does, or user and gap, or write "
            'session = "COLUMN" at the top of the schema'
        )
    needs = "a gap" if wanted.user else "a partition" if wanted.partition else None
    if needs and schema.time is None:
        raise BadSchema(f'{needs} needs times, and the schema names none: write time = "COLUMN" at its top')
    own = converted(schema, None)[0].session  # no other column may get its name, or `skirl same` would compare the two
    unit = schema.time_unit or ("seconds" if needs else "")
    schema = replace(schema, session=session)
    written, kept = converted(schema, files.encoder.rows if wanted.as_rows else None)
    schema = replace(schema, time_unit=unit)
    rows_of = files.encoder.rows_of if wanted.as_rows else Fingerprints()
    files = replace(files, encoder=replace(files.encoder, schema=schema, rows_of=rows_of))
    named = ""
    if wanted.user:
        taken = {c.name for c in (*written.labels, *written.dense, *written.ids)} | {*kept, own}
        named = next(n for n in (SESSION, f"{SESSION}_", f"{SESSION} of user") if n not in taken)
        written = replace(written, session=named)
    read = [column for column in (wanted.user or session, schema.time) if column is not None]
    columns = tuple(dict.fromkeys(read))
    gap = parse_seconds(wanted.gap) if wanted.gap else None
    shape = WrittenColumns(written, kept, columns, schema.time, named, gap, wanted.layout, wanted.compression)
    files = keeping(files, columns, all_there=True)
    return replace(files, dataset=replace(files.dataset, piece_bytes=wanted.piece)), shape


def loads(files: Files, shape: WrittenColumns, most: int, schema: pa.Schema | None = None) -> Iterator[Any]:
    """Yield loads: tables of rows with their sort keys.

    **Arguments**

    - `files`: the rows, with the session and time columns kept.
    - `shape`: what to write.
    - `most`: most bytes of a table, unless one row has more.
    - `schema`: schema of the tables; None for that of the first piece.
    """
    waiting: list[Any] = []
    held = 0
    for piece in (part for whole in files.pieces(expanded=False) for part in parted(whole, max(1, most // 2))):
        kept = dict(zip(shape.columns, piece.kept, strict=True))
        hashes = session_hashes(piece.kept[0])
        times = _times(kept[shape.time], files.encoder.schema.time_unit) if shape.time else np.zeros(len(piece))
        written = replace(piece, kept=[_decoded(kept[column]) for column in shape.kept.values()])
        table = table_of(written, shape.schema, list(shape.kept))
        table = with_keys(table, hashes, times)
        schema = schema or table.schema
        if table.schema != schema:
            table = table.cast(schema)
        if waiting and held + table.nbytes > most:
            yield pa.concat_tables(waiting)
            waiting, held = [], 0
        waiting.append(table)
        held += table.nbytes
    if waiting:
        yield pa.concat_tables(waiting)


def _times(column: Any, unit: str) -> np.ndarray:
    """Return the times that rows are ordered by (float64 [n]): seconds if the unit is known or the column holds dates."""
    column = plain(column, ())
    times = time_bits(column).view(np.float64)
    return times if is_date(column.type) else since_1970(times, unit)


def parted(piece: Encoded, most: int) -> Iterator[Encoded]:
    """Cut a piece into smaller ones with a list for each row, each of at most `most` bytes unless one row has more.

    **Arguments**

    - `piece`: a piece of a file, which may store lists once for many rows.
    - `most`: most bytes of a smaller piece.
    """
    ends, low = np.cumsum(sizes_of(piece)), 0
    while low < len(piece):
        before = ends[low - 1] if low else 0
        high = max(low + 1, int(np.searchsorted(ends, before + most, "right")))
        yield cut(piece, low, high).expanded()
        low = high


def sizes_of(piece: Encoded) -> np.ndarray:
    """Return the bytes of each row with its lists in full (int64 [n]).

    **Arguments**

    - `piece`: a piece of a file.
    """
    sizes = np.full(len(piece), 4 * (piece.labels.shape[1] + piece.dense.shape[1]), np.int64)
    sizes += sum(column.nbytes for column in piece.kept) // max(1, len(piece))
    for f, values in enumerate(piece.ids):
        lengths, inverse = piece.lengths[f], piece.inverse(f)
        own = 1 if lengths is None else lengths if inverse is None else lengths[inverse]
        sizes += values.itemsize * own
    return sizes


def _decoded(column: Any) -> Any:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
