"""Checks that a model can predict other files: their features must mean what those of its training data did."""

from collections.abc import Mapping
from typing import Any

from skirl.data.files.schema import Dense, FileSchema
from skirl.data.files.stream import Files


def check_same_data(stream: Mapping[str, Any], files: Files) -> None:
    """Raise if the features of files are not those of a run, saying what differs. stream: the state of the run's own files.

    Converted files are compared by names, and by how their ids were read: their dense columns are already as the model
    takes them, and their ids may be rows already.
    """
    there, here = FileSchema.parse(stream["schema"]), files.encoder.schema
    _same("id columns", [column.name for column in there.ids], [column.name for column in here.ids])
    _same("dense columns", _dense(there), _dense(here))
    for was, now in zip(there.ids, here.ids):
        if was.list != now.list:
            kinds = ["lists" if column.list else "single ids" for column in (was, now)]
            raise ValueError(f"id column {was.name!r} held {kinds[0]} in the run's data, and holds {kinds[1]} here")
        table = was.table or was.name
        if table != (now.table or now.name):
            raise ValueError(f"id column {was.name!r} was of table {table!r}, and is of {now.table or now.name!r} here")
        if was.rows is not None and was.rows != (rows := files.encoder.rows[table]):
            raise ValueError(
                f"table {table!r} had {was.rows:,} rows in the run, and has {rows:,} with this data: set schema and vocab "
                "to the run's"
            )
    kinds = here.kinds
    for table, kind in there.kinds.items():
        if kinds.get(table, "") not in ("", kind) and kind:
            raise ValueError(
                f"the ids of table {table!r} were read as {kind} in the run, and are read as {kinds[table]} here"
            )
    if there.kinds and kinds and stream["rows_of"] != (mine := files.encoder.rows_of.described):
        raise ValueError(
            f"the run's ids became rows {stream['rows_of']}, and these would {mine}: set vocab to the run's vocabulary"
        )
    if not (_converted(there) or _converted(here)):
        for was, now in zip(there.dense, here.dense):
            for what in ("transform", "fill"):
                if (before := getattr(was, what)) != (after := getattr(now, what)):
                    raise ValueError(
                        f"dense column {was.name!r} had {what} {before!r} in the run, and has {after!r} here: set schema to "
                        "the run's"
                    )


def _same(what: str, were: list[str], are: list[str]) -> None:
    if were != are:
        raise ValueError(
            f"the run's {what} are {', '.join(were) or 'none'}, and these are {', '.join(are) or 'none'}: set data and "
            "schema so that they are the same"
        )


def _dense(schema: FileSchema) -> list[str]:
    """Return the names of a model's dense features. In a converted file, indicators are columns of their own."""

    def names(column: Dense) -> list[str]:
        return [column.name, f"{column.name} is missing"] if column.indicator else [column.name]

    return [name for column in schema.dense for name in names(column)]


def _converted(schema: FileSchema) -> bool:
    return all(column.type == "fingerprint" or column.encode == "row" for column in schema.ids)
