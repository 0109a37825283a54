"""Writes data files as a folder of Parquet by session: rows go to buckets on disk, each is put in order by itself."""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from skirl.data.convert import converted, keeping, table_of
from skirl.data.files.encode import Fingerprints
from skirl.data.files.errors import BadSchema
from skirl.data.files.stream import Files
from skirl.dedup.finish import Shape, finish, plan, spilled, with_keys
from skirl.dedup.row_hash import session_hashes, time_bits
from skirl.dedup.spill import Spill
from skirl.store.disk.lock import Lock
from skirl.tools.durations import parse_seconds
from skirl.tools.os_errors import writing
from skirl.tools.progress import Progress
from skirl.tools.sealed_json import CheckpointError, read_sealed, skirl_version, sync_folder, write_sealed

BASE = 448 << 20
"""Bytes of a process that has read nothing yet: Python, torch, Arrow, kernels."""
FEWEST, MOST = 16, 1024
"""Buckets."""
GROWS = 6
"""How many times as large as a file its rows may be in memory; if they are larger, buckets are read in several goes."""
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


def convert_by_session(
    files: Files, out: str, wanted: Wanted, *, force: bool, json: bool, quiet: bool
) -> dict[str, Any]:
    """Write the folder, or go on with it; what the command prints.

    **Arguments**

    - `files`: the rows.
    - `out`: the folder; it is there when all of it is written.
    - `wanted`: how.
    - `force`: replace a folder that is there.
    - `json`: progress does not go where the result does.
    - `quiet`: show no progress.
    """
    files, shape = shaped(files, wanted)
    _check_apart(files, out)
    work = Path(f"{out}.unfinished")
    with writing(work):
        work.mkdir(exist_ok=True)
    lock = Lock(work)
    try:
        of = _identity(files, wanted)
        manifest = _read(work, of)
        with Progress("convert", steps=None, to=sys.stderr if json else sys.stdout, quiet=quiet) as progress:
            if manifest is None:
                manifest = _spill(files, shape, wanted, work, of, progress)
        units = manifest["units"]
        title = "write"
        with Progress(title, steps=len(units), to=sys.stderr if json else sys.stdout, quiet=quiet) as progress:
            for number, rows in enumerate(finish(work, shape, manifest), start=1):
                facts = {"rows": f"{rows:,} of {manifest['samples']:,}", "buckets": f"{number:,} of {len(units):,}"}
                progress(number, lambda facts=facts: facts)
        _put_in_place(work, Path(out), force)
    finally:
        lock.release()
    shutil.rmtree(work, ignore_errors=True)
    parts = sorted(Path(out).iterdir())
    kept = ("samples", "sessions", "cut_at_borders", "cut_as_too_long", "bad_rows_skipped", "first_bad_row", "groups")
    return {name: manifest[name] for name in kept} | {
        "files": len(parts),
        "bytes": sum(part.stat().st_size for part in parts),
        "spilled_bytes": sum(manifest["sizes"]),
    }


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
    schema = replace(schema, session=session)
    rows_of = files.encoder.rows_of if wanted.as_rows else Fingerprints()
    files = replace(files, encoder=replace(files.encoder, schema=schema, rows_of=rows_of))
    written, kept = converted(schema, files.encoder.rows if wanted.as_rows else None)
    names = [c.name for c in (*written.labels, *written.dense, *written.ids)]
    named = ""
    if wanted.user:
        named = next(n for n in (SESSION, f"{SESSION}_", f"{SESSION} of user") if n not in (*names, *kept))
        written = replace(written, session=named)
    read = [column for column in (wanted.user or session, schema.time) if column is not None]
    columns = tuple(dict.fromkeys(read))
    gap = parse_seconds(wanted.gap) if wanted.gap else None
    shape = Shape(written, kept, columns, schema.time, named, gap, wanted.layout, wanted.compression)
    return keeping(files, columns, all_there=True), shape


def _check_apart(files: Files, out: str) -> None:
    folder = Path(out).resolve()
    for path in map(Path, files.dataset.paths):
        if folder == path.resolve().parent or folder in path.resolve().parents:
            raise ValueError(f"out is {out!r}, the folder that {path} is read from: name another")


def _identity(files: Files, wanted: Wanted) -> dict[str, Any]:
    stats = [(path, os.stat(path)) for path in files.dataset.paths]
    return asdict(wanted) | {
        "files": [f"{path} ({stat.st_size} bytes, {stat.st_mtime_ns})" for path, stat in stats],
        "schema": files.encoder.schema.toml(),
        "ids": f"{files.encoder.rows_of.described} {dict(files.encoder.rows) if wanted.as_rows else ''}",
        "bad_rows": "skip" if files.encoder.skip else "refuse",
        "skirl": skirl_version(),
    }


def _read(work: Path, of: dict[str, Any]) -> dict[str, Any] | None:
    """What an earlier command has written to its buckets; None where it was not done with it."""
    begun, path = work / "begun.json", work / "spilled.json"
    then = f"run the command as it was, or remove {work} to begin anew"
    if begun.is_file():
        try:
            was = read_sealed(begun, format="skirl convert", version=1, what="convert")["of"]
        except CheckpointError:
            raise ValueError(f"{begun} is damaged: remove {work}, and run the command again") from None
        for name, value in of.items():
            if was.get(name) != value:
                raise ValueError(f"{work} is of a convert with {_differs(name, was.get(name), value)}: {then}")
        if path.is_file():
            try:
                return read_sealed(path, format="skirl convert", version=1, what="convert")
            except CheckpointError:
                raise ValueError(f"{path} is damaged: remove {work}, and run the command again") from None
    else:
        write_sealed(
            begun, {"format": "skirl convert", "format_version": 1, "skirl": skirl_version(), "of": of}, "begun"
        )
    return None


def _differs(name: str, was: Any, now: Any) -> str:
    if name == "files" and isinstance(was, list):
        mine = next((f for f in now if f not in was), None)
        gone = next((f for f in was if f not in now), None)
        return f"other files ({gone or 'without ' + str(mine)}, not {mine or 'without it'})"
    return "another schema" if name == "schema" else f"{name.replace('_', '-')} {was}, not {now}"


def _spill(
    files: Files, shape: Shape, wanted: Wanted, work: Path, of: dict[str, Any], progress: Progress
) -> dict[str, Any]:
    """Read everything once, and write rows to their buckets."""
    folder = work / "spill"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(work / "parts", ignore_errors=True)
    with writing(folder):
        folder.mkdir()
        (work / "parts").mkdir()
    total = sum(os.stat(path).st_size for path in files.dataset.paths)
    buckets = min(MOST, max(FEWEST, 1 << (GROWS * total // wanted.unit).bit_length()))
    seconds = parse_seconds(wanted.partition) if wanted.partition else None
    spill = Spill(folder, buckets)
    samples, schema = 0, None
    try:
        for table in loads(files, shape, wanted.load):
            schema = schema or table.schema
            spilled(spill, table if table.schema == schema else table.cast(schema), buckets, seconds)
            samples += len(table)
            facts = {"rows": f"{samples:,}", "buckets": f"{buckets:,}"}
            progress(samples, lambda facts=facts: facts)
        if schema is None:
            raise ValueError(f"{files.dataset.paths[0]}: there is no row to write: give more files")
        spill.close()
    finally:
        spill.close(whole=False)
    sync_folder(folder)
    body: dict[str, Any] = {
        "format": "skirl convert", "format_version": 1, "skirl": skirl_version(), "samples": samples,
        "sizes": spill.sizes, "rows_schema": schema.serialize().to_pybytes().hex(),
        "bad_rows_skipped": files.bad_rows, "first_bad_row": files.first_bad_row,
    }  # fmt: skip
    body |= plan(work, shape, body, wanted.unit)
    write_sealed(work / "spilled.json", body, "spilled")
    return body


def loads(files: Files, shape: Shape, most: int) -> Iterator[Any]:
    """Tables of rows with what they are ordered by.

    **Arguments**

    - `files`: with the columns that say session and time.
    - `shape`: what is written of them.
    - `most`: bytes of a table, and those of a piece of a file.
    """
    waiting: list[Any] = []
    held = 0
    for piece in files.pieces():
        if not len(piece):
            continue
        kept = dict(zip(shape.columns, piece.kept, strict=True))
        hashes = session_hashes(piece.kept[0])
        times = time_bits(kept[shape.time]).view(np.float64) if shape.time else np.zeros(len(piece))
        written = replace(piece, kept=[_decoded(kept[column]) for column in shape.kept.values()])
        table = table_of(written, shape.schema, list(shape.kept))
        table = with_keys(table, hashes, times)
        if waiting and table.schema != waiting[0].schema:
            table = table.cast(waiting[0].schema)
        waiting.append(table)
        held += table.nbytes
        if held >= most:
            yield pa.concat_tables(waiting)
            waiting, held = [], 0
    if waiting:
        yield pa.concat_tables(waiting)


def _decoded(column: Any) -> Any:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _put_in_place(work: Path, out: Path, force: bool) -> None:
    """Let the folder be there, all at once."""
    with writing(out):
        if out.exists() and force:
            os.rename(out, work / "replaced")
        os.rename(work / "parts", out)
        sync_folder(out.absolute().parent)


def clean(out: str) -> None:
    """Remove what a convert has left that was ended behind its last step.

    **Arguments**

    - `out`: its folder.
    """
    work = Path(f"{out}.unfinished")
    if Path(out).exists() and not (work / "parts").exists():
        shutil.rmtree(work, ignore_errors=True)
