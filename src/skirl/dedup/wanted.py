"""What `skirl convert --by session` is asked for, and the rows that it reads: with what they are ordered by."""

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
from skirl.dedup.finish import Shape, with_keys
from skirl.dedup.row_hash import session_hashes, time_bits
from skirl.tools.durations import parse_seconds

BASE = 448 << 20
"""Bytes of a process that has read nothing yet: Python, torch, Arrow, kernels."""
SESSION = "session"
"""What the column is called that says the session where only users are known."""


@dataclass(frozen=True)
class Wanted:
    """What `skirl convert --by session` is to do; the same command goes on where one was ended.

    **Arguments**

    - `session`: the column that says which rows belong together; None: the schema's, or users.
    - `user`: the column of users, whose sessions end where nothing comes for a while.
    - `gap`: how long that is.
    - `partition`: a length of time that no file crosses; None: all time is one.
    - `memory`: bytes, of the whole process.
    - `layout`: "once" leaves lists out that equal the row above's; "window" writes lists that shift as windows of one;
      "rows" leaves nothing out.
    - `compression`: of pages.
    - `as_rows`: ids are rows of tables, not fingerprints.
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
        """Bytes of rows that are sorted at once."""
        return max(1 << 16, (self.memory - BASE) // 6)

    @property
    def load(self) -> int:
        """Bytes of rows that are read before they are written to buckets."""
        return max(1 << 16, (self.memory - BASE) // 8)

    @property
    def piece(self) -> int:
        """Bytes of rows that are decoded at once, about."""
        return self.load // 2

    @property
    def frame(self) -> int:
        """Bytes of rows that are read back at once: rows in order are read from as many frames as there were loads."""
        return max(1 << 12, self.load // 1024)


def shaped(files: Files, wanted: Wanted) -> tuple[Files, Shape]:
    """The files with the columns that say session and time, and what is written of them.

    **Arguments**

    - `files`: the rows.
    - `wanted`: how they are to be written.
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
    own = converted(schema, None)[0].session  # whose name no other column gets: `skirl same` would compare the two
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
    shape = Shape(written, kept, columns, schema.time, named, gap, wanted.layout, wanted.compression)
    files = keeping(files, columns, all_there=True)
    return replace(files, dataset=replace(files.dataset, piece_bytes=wanted.piece)), shape


def loads(files: Files, shape: Shape, most: int, schema: pa.Schema | None = None) -> Iterator[Any]:
    """Tables of rows with what they are ordered by.

    **Arguments**

    - `files`: with the columns that say session and time.
    - `shape`: what is written of them.
    - `most`: bytes of a table, and those of a piece of a file.
    - `schema`: of the tables; None: that of the first piece.
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
    """float64 [n]: what rows are ordered by; seconds, where the unit is known or these are dates."""
    column = plain(column, ())
    times = time_bits(column).view(np.float64)
    return times if is_date(column.type) else since_1970(times, unit)


def parted(piece: Encoded, most: int) -> Iterator[Encoded]:
    """A piece in stretches with a list for each row, of so many bytes at most unless one row has more.

    **Arguments**

    - `piece`: of a file, which may hold lists once for many rows.
    - `most`: bytes of a stretch.
    """
    ends, low = np.cumsum(sizes_of(piece)), 0
    while low < len(piece):
        before = ends[low - 1] if low else 0
        high = max(low + 1, int(np.searchsorted(ends, before + most, "right")))
        yield cut(piece, low, high).expanded()
        low = high


def sizes_of(piece: Encoded) -> np.ndarray:
    """int64 [n]: bytes of each row, with its lists.

    **Arguments**

    - `piece`: of a file.
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
