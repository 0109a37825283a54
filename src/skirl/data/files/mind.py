"""MIND's behaviors.tsv: each line is an impression, and each item that it shows is a sample."""

from dataclasses import replace

import numpy as np
import pyarrow as pa

from skirl.data.files.columns import pc, plain
from skirl.data.files.encode import Raw
from skirl.data.files.schema import FileSchema, Id, Label, Text
from skirl.data.files.text import PART, TextFile

LINE = ("impression", "user", "time", "history", "shown")
"""The columns. Items of a history are separated by spaces, and so are items shown, each of which ends with "-1" if it was
clicked and "-0" if not; in the test set it has no ending."""
MIND = FileSchema(
    labels=(Label("click"),),
    dense=(),
    ids=(Id("user"), Id("item"), Id("history", table="item", list=True, separator=" ")),
    session="impression",
    time="time",
    text=Text("tab", ("impression", "user", "time", "history", "item", "click"), "no", samples="shown"),
)
"""The schema of its samples. Those of `criteo` and `avazu` are in schema.py."""
_LINES = FileSchema((), (), tuple(Id(name) for name in LINE), text=Text("tab", LINE, "no"))
_WHEN = "%m/%d/%Y %I:%M:%S %p"


class MindFile(TextFile):
    """A behaviors.tsv file. A line that cannot be split into columns counts as one malformed sample."""

    def __init__(self, path: str, schema: FileSchema, packed: bool, part: int = PART) -> None:
        super().__init__(path, replace(_LINES, missing=schema.missing), packed, part)
        self._needed = schema.needed

    def rows(self, part: int) -> int:
        raw = super().read(part)
        return int(_samples(raw, _shown(raw)).sum())

    def read(self, part: int, rows: np.ndarray | None = None) -> Raw:
        raw = super().read(part)
        shown = _shown(raw)
        lines, counts = raw.places, _samples(raw, shown)
        first = np.cumsum(counts) - counts
        of = np.repeat(np.arange(raw.rows), counts[lines])
        columns = {name: plain(raw.columns[name], ()).take(pa.array(of)) for name in LINE[:2] + LINE[3:4]}
        moments = pc.strptime(plain(raw.columns["time"], ()), format=_WHEN, unit="s", error_is_null=True)
        columns["time"] = moments.take(pa.array(of))
        each = pc.list_flatten(shown) if raw.rows else pa.array([], pa.string())
        found = pc.extract_regex(each, "^(?P<item>.*)-(?P<click>[^-]*)$")
        split = found.is_valid()  # items without a click mark, as in the test set, have no label
        columns["item"] = pc.if_else(split, pc.struct_field(found, "item"), each)
        columns["click"] = pc.if_else(split, pc.struct_field(found, "click"), None)
        places = first[lines][of] + np.arange(len(of)) - (np.cumsum(counts[lines]) - counts[lines])[of]
        broken = [(int(first[line]), found_, wanted) for line, found_, wanted in raw.broken]
        ends = first + counts
        done = Raw(
            {name: columns[name] for name in self._needed},
            len(of),
            self.path,
            lambda row: raw.where(int(np.searchsorted(ends, row, side="right"))),
            broken,
            places,
            nulls=True,
        )
        return done if rows is None else done.only(rows)


def _shown(raw: Raw) -> pa.Array:
    """Return the items of each line; a line without items has a single missing one."""
    texts = plain(raw.columns["shown"], ())
    return pc.split_pattern(pc.fill_null(texts, ""), " ")


def _samples(raw: Raw, shown: pa.Array) -> np.ndarray:
    """Return the number of samples of each line of the part (int64); a line that could not be split counts as one."""
    counts = np.ones(raw.rows + len(raw.broken), np.int64)
    counts[raw.places] = pc.list_value_length(shown).to_numpy(zero_copy_only=False)
    return counts
