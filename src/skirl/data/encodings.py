"""Turns raw values into ids, for a Dataset or a collate function: the same ids that `skirl train` makes from files."""

import os
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import pyarrow as pa
import torch

from skirl.data.files.columns import is_list, is_text, plain, value_at
from skirl.data.files.encode import ByHash, Encoder, Fingerprints, RowsOf
from skirl.data.files.find import shown
from skirl.data.files.schema import BUILT_IN, FileSchema, Id, Label
from skirl.data.open import encoding_of, load_vocabulary
from skirl.data.vocabulary.growing import Growth

Type = Literal["string", "hex", "int", "float"]
_TYPES: dict[str, Type] = {"texts": "string", "hex": "hex", "numbers": "int"}


class Encoding:
    """Maps the values of one id column to rows; made by `Hashed`, `InVocabulary`, `Grown` and `encodings_of`.

    Called with one value, it returns its row as an int; with a list, an array or a tensor of values, an int64 tensor. With
    a `separator`, each text holds a list: one text returns a tensor of rows, and several texts a list of such tensors.
    """

    def __init__(self, encoder: Encoder, spec: Id) -> None:
        self._encoder, self._spec = encoder, spec

    @property
    def table(self) -> str:
        return self._spec.table or self._spec.name

    @property
    def rows(self) -> int:
        """Of that table, to pass to `skirl.Table`."""
        return self._encoder.rows[self.table]

    def __call__(self, values: Any) -> Any:
        return self._called(values, self._rows)

    def _called(self, values: Any, rows_of: Any) -> Any:
        if getattr(values, "shape", None) == ():
            values = values.item()
        one = isinstance(values, str | bytes) or not hasattr(values, "__len__")
        if self._spec.separator:
            bags = [self._split(text) for text in ([values] if one else values)]
            found = rows_of([item for bag in bags for item in bag]).split([len(bag) for bag in bags])
            return found[0] if one else list(found)
        rows = rows_of([values] if one else values)
        return int(rows[0]) if one else rows

    def _split(self, text: Any) -> list[str]:
        if text is None or text in self._encoder.schema.missing:
            return []
        if not isinstance(text, str):
            self._refuse(f"a list is a {type(text).__name__}: give a text, in which {self._spec.separator!r} separates")
        return text.split(self._spec.separator)

    def _rows(self, values: Any) -> torch.Tensor:
        spec, column = self._spec, plain(self._column(values), self._encoder.schema.missing)
        if spec.type in ("string", "hex") and not is_text(column.type) and not pa.types.is_null(column.type):
            kind = "float" if pa.types.is_floating(column.type) else "int"
            self._refuse(f"values are {column.type}, and its type is {spec.type}: give texts, or set type to {kind}")
        rows, wrong, expected = self._encoder.rows_in(self.table, column, spec)
        if wrong is not None and wrong.any():
            place = int(np.argmax(wrong))
            found = shown(value_at(column, place))
            raise ValueError(f"{spec.name}: value {place} is {found}, expected {expected}: fix it, or leave it out")
        return torch.from_numpy(rows.astype(np.int64))

    def _column(self, values: Any) -> pa.Array | pa.ChunkedArray:
        if isinstance(values, torch.Tensor):
            values = values.detach().cpu().numpy()
        try:
            made = isinstance(values, pa.Array | pa.ChunkedArray)
            column = values if made else pa.array(values, from_pandas=self._encoder.schema.nan_is_missing)
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            if any(isinstance(value, float) and np.isnan(value) for value in values):
                self._refuse("a value is NaN, as pandas writes missing values: set nan_is_missing=True, or fill it")
            self._refuse(f"values are not of one kind ({str(error).splitlines()[0]}): give texts, or numbers")
        if is_list(column.type):
            self._refuse("values are lists: give those of one sample at a time")
        return column

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(f"{self._spec.name}: {what}")


class Hashed(Encoding):
    """Ids by hash, as with `skirl train --rows`: row 0 for a missing value, a row from 1 on for any other.

    **Arguments**

    - `table`: its name seeds the hash: with the same name, rows and type, `skirl train` makes the same ids.
    - `type`: how values are read: "string", "hex", "int", or "float" (whole numbers).
    - `missing`: texts that mean no value, as None does.
    - `nan_is_missing`: treat NaN as a missing value; by default it is refused.
    - `separator`: separates the values of a list in one text; by default a text is one value.

    >>> item = Hashed(1000, "item")
    >>> item(["a17", None, "b3"]).tolist() == [item("a17"), 0, item("b3")]
    True
    """

    def __init__(
        self, rows: int, table: str, *, type: Type = "string", missing: Sequence[str] = ("",), nan_is_missing: bool = False,
        separator: str = "",
    ) -> None:  # fmt: skip
        if not isinstance(rows, int | np.integer) or not isinstance(table, str):
            order = "the number of rows comes first, then the table's name"
            raise TypeError(f'Hashed({rows!r}, {table!r}): {order}: write Hashed(1000, "item")')
        super().__init__(*_encoder(table, ByHash({table: rows}), rows, type, missing, nan_is_missing, separator))


class InVocabulary(Encoding):
    """Ids by a vocabulary file of `skirl vocab`: row 0 for a missing value, row 1 for one not in it, else a row of its own.

    **Arguments**

    - `type`: how values are read, as in `Hashed`; None uses the type that the file records.
    - `missing`, `nan_is_missing`, `separator`: as in `Hashed`.
    """

    def __init__(
        self, path: str | os.PathLike[str], table: str, *, type: Type | None = None, missing: Sequence[str] = ("",),
        nan_is_missing: bool = False, separator: str = "",
    ) -> None:  # fmt: skip
        vocabulary = load_vocabulary(str(path))
        if table not in vocabulary.rows:
            there = ", ".join(map(repr, vocabulary.rows))
            raise ValueError(f"vocabulary {path}: it has no table {table!r}: there are {there}")
        known = _TYPES.get(vocabulary.types[table])
        if type is None and known is None:
            raise ValueError(f"vocabulary {path}: it does not say what the values of {table!r} were: set type")
        rows = vocabulary.rows[table]
        encoder, spec = _encoder(table, vocabulary, rows, type or known or "string", missing, nan_is_missing, separator)
        vocabulary.check(encoder.schema)
        super().__init__(encoder, spec)


class Grown(Encoding):
    """Ids by a vocabulary that grows as values arrive, as with `skirl train --vocab open`.

    A missing value has row 0. Any other has row 1 until it has occurred `admit` times, then a row of its own if the table
    is not full.

    Every call counts its values. So call it once for each value, in training order and in one process: not in DataLoader
    workers, whose vocabularies would diverge. `look_up` counts nothing.

    **Arguments**

    - `admit`: the occurrence at which a value gets a row of its own.
    - `stale`: forget a value after this many calls without it, which bounds memory, as `--stale` does by batches.
    - `type`, `missing`, `nan_is_missing`, `separator`: as in `Hashed`.

    >>> item = Grown(1000, "item", admit=2)
    >>> item(["a", "b", "a", None]).tolist(), item.look_up("a"), item("b")
    ([1, 1, 2, 0], 2, 3)
    """

    def __init__(
        self, rows: int, table: str, *, admit: int = 10, stale: int | None = None, type: Type = "string",
        missing: Sequence[str] = ("",), nan_is_missing: bool = False, separator: str = "",
    ) -> None:  # fmt: skip
        for name, value in (("admit", admit), ("stale", stale)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: set it to 1 or more")
        super().__init__(*_encoder(table, Fingerprints(), rows, type, missing, nan_is_missing, separator))
        self._growth, self._stale, self._calls, self._pid = Growth(rows, admit), stale, 0, os.getpid()

    def __call__(self, values: Any) -> Any:
        if os.getpid() != self._pid:
            raise RuntimeError(_ONE_PROCESS)
        self._calls += 1
        self._growth.age(self._calls, self._stale)
        return self._of(values, lambda prints: self._growth.grow(prints, self._calls))

    def look_up(self, values: Any) -> Any:
        """Return the same rows without counting, for evaluation."""
        return self._of(values, self._growth.look_up)

    def _of(self, values: Any, rows_of: Any) -> Any:
        return self._called(values, lambda raw: torch.from_numpy(rows_of(self._rows(raw).numpy().view(np.uint64))))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(_ONE_PROCESS)

    @property
    def _about(self) -> dict[str, Any]:
        how = {"admit": self._growth.admit, "stale": self._stale, "type": self._spec.type}
        return {"table": self.table, "rows": self.rows, **how}

    def state_dict(self) -> dict[str, Any]:
        grown = {"grown": self._growth.state_dict(), "admitted": self._growth.admitted}
        return {**self._about, "calls": self._calls, **grown}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Raise if it was taken with other arguments."""
        for name, value in self._about.items():
            if (was := state.get(name)) != value:
                what = f"the vocabulary was grown with {name}={was!r}, here it is {value!r}"
                raise ValueError(f"{what}: set it to what it was")
        self._growth.load_state_dict(state["grown"], state["admitted"])
        self._calls = state["calls"]


_ONE_PROCESS = (
    "a Grown vocabulary is of one process, and each worker would give ids rows of its own: call it in the training process, "
    "on what the DataLoader yields"
)


class Longest:
    """Cuts a sample's list of values or ids to at most `length` entries. None stays None.

    **Arguments**

    - `keep`: "last", the most recent in a history ordered by time, or "first".

    >>> Longest(2)([1, 2, 3]), Longest(2, keep="first")(torch.tensor([1, 2, 3])).tolist()
    ([2, 3], [1, 2])
    """

    def __init__(self, length: int, keep: Literal["first", "last"] = "last") -> None:
        if not isinstance(length, Integral) or length < 1:
            raise ValueError(f"length is {length}: set it to a whole number, 1 or more")
        if keep not in ("first", "last"):
            raise ValueError(f"keep is {keep!r}: set it to 'first' or 'last'")
        self.length, self.keep = length, keep

    def __call__(self, values: Any) -> Any:
        kept = slice(self.length) if self.keep == "first" else slice(-self.length, None)
        return None if values is None else values[kept]


class Default:
    """Puts a default id in place of None, of each None in a list, and into an empty list as its only entry.

    **Arguments**

    - `id`: the default id. Rows by hash or vocabulary do not need it: they have row 0 for a missing value.

    >>> Default(7)(None), Default(7)([]), Default(7)([1, None]), Default(7)(torch.tensor([])).tolist()
    (7, [7], [1, 7], [7])
    """

    def __init__(self, id: int) -> None:
        self.id = id

    def __call__(self, ids: Any) -> Any:
        if ids is None:
            return self.id
        if not hasattr(ids, "__len__") or getattr(ids, "shape", None) == ():
            return ids
        if isinstance(ids, torch.Tensor):
            return ids if ids.numel() else torch.tensor([self.id])
        if isinstance(ids, np.ndarray) and ids.dtype != object:
            return ids if ids.size else np.array([self.id])
        return [self.id if one is None else one for one in ids] or [self.id]


def encodings_of(
    schema: str | os.PathLike[str], *, rows: str | int | None = None, vocab: str | None = None
) -> dict[str, Encoding]:
    """Return an encoding for each id column of a schema, which makes the ids that `skirl train` makes with these flags.

    **Arguments**

    - `schema`: path of a schema file, or "criteo" or "avazu".
    - `rows`: as `--rows`: 100000, or "100000,C3=2000000"; None uses the schema's.
    - `vocab`: as `--vocab`: a file made by `skirl vocab`. For a vocabulary that grows, make a `Grown` for each table.
    """
    if vocab == "open":
        raise ValueError("a vocabulary that grows is of one table: make a skirl.Grown for each")
    name = str(schema)
    read = BUILT_IN[name] if name in BUILT_IN and not Path(name).exists() else FileSchema.load(name)
    read = replace(read, dense=(), time=None, time_unit="")
    of_tables, rows_of = encoding_of(read, None if rows is None else str(rows), vocab)
    encoder = Encoder(read, rows_of, of_tables)
    return {column.name: Encoding(encoder, column) for column in read.ids}


def _encoder(
    table: str, rows_of: RowsOf, rows: int, type: Type, missing: Sequence[str], nan_is_missing: bool, separator: str
) -> tuple[Encoder, Id]:
    """As a schema file with this one column would give."""
    if type not in ("string", "hex", "int", "float"):
        raise ValueError(f"{table}: type is {type!r}, set it to 'string', 'hex', 'int' or 'float'")
    texts = (missing,) if isinstance(missing, str) else tuple(missing)
    spec = Id(table, type=type, rows=rows, list=bool(separator), separator=separator)
    schema = FileSchema((Label("label"),), (), (spec,), missing=texts, nan_is_missing=nan_is_missing)
    return Encoder(schema, rows_of, {table: rows}), spec
