"""Compares streams of files: one can continue from another's state only if both are the same stream."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from skirl.data.files.dataset import RowPosition
from skirl.data.files.encode import Encoder
from skirl.data.files.errors import BadSchema
from skirl.data.files.schema import Dense, FileSchema, Id, Label

KINDS = {"labels": "a label", "dense": "a dense column", "ids": "an id column"}
"""What an error calls a column of each kind."""
ORDER = "sessions"
"""Key for how sessions are shuffled; absent if they are not."""
REPEATS = "repeats"
"""Key for searching repeated lists: gradients are then summed by list first, which may change the last bit."""


def identity_of(
    encoder: Encoder,
    files: Sequence[str],
    rows: tuple[RowPosition, RowPosition | None],
    *,
    batch_size: int,
    shuffle: int,
    seed: int,
    most_rows: int | None,
    find_repeats: bool = False,
) -> dict[str, Any]:
    """Return the identity of a stream, in types that JSON has.

    rows: where the stream begins and ends; None for the end of the last file.
    """
    paths = [Path(path) for path in files]
    begin, end = rows
    reads = f"from {_at(begin)} to {'the end' if end is None else _at(end)}"
    if encoder.keep is not None:
        span = encoder.keep
        reads += f" where {span.low} <= {span.column} < {span.high}"
    # Use the actual numbers of rows (from a flag, the schema or a vocabulary). The session column and the time unit do not
    # change what training reads; the order of sessions is stored under its own key.
    ids = tuple(replace(column, rows=encoder.rows[column.table or column.name]) for column in encoder.schema.ids)
    return {
        "files": [f"{path.name} ({path.stat().st_size} bytes)" for path in paths],
        "reads": reads,
        "rows_of": encoder.rows_of.described,
        "schema": replace(encoder.schema, ids=ids, session=None, time_unit="").toml(),
        "batch_size": batch_size,
        "shuffle": shuffle,
        "seed": seed if shuffle else 0,
        "bad_rows": "skip" if encoder.skip else "refuse",
    } | {
        **({} if most_rows is None else {ORDER: f"{encoder.session}, at most {most_rows or 'all'} rows"}),
        **({REPEATS: "find"} if find_repeats else {}),
    }


def check_identity(theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raise if a state is of another stream, saying what differs."""
    if theirs.get("files") != mine["files"]:
        raise ValueError(_other_files(theirs.get("files"), mine["files"]))
    if theirs.get("reads") != mine["reads"]:
        raise ValueError(
            f"the state is of a stream that reads {theirs.get('reads')}, not {mine['reads']}: set valid to what it was"
        )
    for name in ("schema", "rows_of"):
        if not isinstance(theirs.get(name), str):
            raise ValueError(
                "the state does not say which schema, rows and vocabulary it is of: go on with the skirl that saved it"
            )
    if theirs["rows_of"] != mine["rows_of"]:
        raise ValueError(
            f"the state is of a stream whose ids become rows {theirs['rows_of']}, not {mine['rows_of']}: set vocab to what "
            "it was"
        )
    if theirs["schema"] != mine["schema"]:
        raise ValueError(_other_schema(theirs["schema"], mine["schema"]))
    if theirs.get(ORDER) != mine.get(ORDER):
        was, now = (of.get(ORDER, "none") for of in (theirs, mine))
        raise ValueError(
            f"the state is of a stream whose sessions are shuffled by {was}, not {now}: set session-order and most-rows "
            "to what they were"
        )
    if theirs.get(REPEATS) != mine.get(REPEATS):
        was, now = (of.get(REPEATS, "stored") for of in (theirs, mine))
        raise ValueError(f"the state is of a stream with repeats {was!r}, not {now!r}: set repeats to what it was")
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise ValueError(
                f"the state is of a stream with {name}={theirs.get(name)!r}, not {value!r}: set it to that"
            )


def _at(place: RowPosition) -> str:
    return f"file {place.file} part {place.part} row {place.row}"


def _other_files(theirs: Any, mine: list[str]) -> str:
    """Return a message that says how the files of a state differ from these."""
    then = "set data to the files it was taken on"
    if not isinstance(theirs, list):
        return f"the state does not say which files it is of: {then}, with the skirl that saved it"
    if len(theirs) != len(mine):
        return f"the state is of a stream with {len(theirs)} files, not {len(mine)}: {then}"
    number = next(i for i, (a, b) in enumerate(zip(theirs, mine)) if a != b)
    return f"the state is of other files: file {number} was {theirs[number]}, and is {mine[number]}: {then}"


def _other_schema(theirs: str, mine: str) -> str:
    """Return a message that says how the schema of a state differs from this one."""
    here = FileSchema.parse(mine)
    try:
        there = FileSchema.parse(theirs)
    except BadSchema as error:
        return f"the state is of a stream with another schema, which this skirl cannot read ({error}): set schema to it"
    for what, kind in KINDS.items():
        if (found := _other_columns(kind, getattr(there, what), getattr(here, what))) is not None:
            return f"the state is of a stream {found} to what it was"
    for one, other in ((there, here), (there.text, here.text)):
        for name in (field.name for field in fields(one) if field.name not in KINDS and field.name != "text"):
            if (was := getattr(one, name)) != (now := getattr(other, name)):
                return f"the state is of a stream whose schema has {name} = {was!r}, not {now!r}: set schema to what it was"
    return "the state is of a stream with another schema: set schema to what it was"


Columns = Sequence[Label] | Sequence[Dense] | Sequence[Id]


def _other_columns(kind: str, theirs: Columns, mine: Columns) -> str | None:
    """Return how columns of one kind differ, and the flag to set; None if they are equal."""
    there, here, plain = {c.name: c for c in theirs}, {c.name: c for c in mine}, kind.partition(" ")[2]
    for name in (n for n in there if n not in here):
        return f"whose schema has {kind} {name!r}, and this one has none: set schema"
    for name in (n for n in here if n not in there):
        return f"whose schema has no {plain} {name!r}, and this one has one: set schema"
    for name, column in there.items():
        for field in fields(column):
            if (was := getattr(column, field.name)) != (now := getattr(here[name], field.name)):
                if field.name == "rows":
                    return f"with {was:,} rows in the table of {name!r}, not {now:,}: set rows"
                return f"whose schema has {field.name} = {was!r} for {plain} {name!r}, not {now!r}: set schema"
    return None if list(there) == list(here) else f"whose schema has its {plain}s in another order: set schema"
