"""Letters that trainers send each other about a batch: one array of int32 from every trainer to every trainer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from skirl.core.tables import Schema
from skirl.oracle.halves import NARROW, Requests, row_type
from skirl.oracle.reach import Vote

BATCH, END, ERROR = 0, 1, 2
HEAD = 4
"""Words before what is asked for."""
_MOST = 2**31 - 1


@dataclass(slots=True)
class Letter:
    """A message from one trainer to another."""

    kind: int
    """`BATCH`; `END`: there are no more; or `ERROR`: the sender cannot go on."""
    number: int
    """Number of batches that it told of before."""
    vote: Vote
    banks: list[Requests] = field(default_factory=list)
    """The rows that it requests, if it is a batch."""
    text: str = ""
    """The text, if it is an error."""


class Letters:
    """Writes and reads letters about batches of these banks.

    A letter begins with its kind, the number of the batch and the sender's vote (2 words). For a batch, the row counts of
    every table of every bank follow, then the rows, bank after bank. For an error, its text follows. A row is one word,
    and half a word more in a table of more than 2**31 rows.
    """

    def __init__(self, banks: Sequence[tuple[Schema, int]]) -> None:
        ends = HEAD + np.cumsum([0, *(len(schema.banks[bank].tables) for schema, bank in banks)])
        self._counts = [slice(begin, end) for begin, end in pairwise(ends.tolist())]
        self._wide = [
            np.array([schema.tables[t].rows > NARROW for t in schema.banks[bank].tables]) for schema, bank in banks
        ]
        self._types = [row_type(schema, bank) for schema, bank in banks]

    def write(self, letter: Letter) -> np.ndarray:
        """Return a letter as int32."""
        if letter.kind == BATCH:
            return self.write_batch(letter.number, letter.vote, [letter.banks])[0]
        head = _head(letter.kind, letter.number, letter.vote)
        if letter.kind == END:
            return head
        text = letter.text.encode()
        return np.concatenate([head, np.array([len(text)], np.int32), _padded(np.frombuffer(text, np.uint8))])

    def write_batch(self, number: int, vote: Vote, asked: Sequence[Sequence[Requests]]) -> list[np.ndarray]:
        """Return the letters about one batch to several trainers, which differ in what they ask for."""
        head = _head(BATCH, number, vote)
        return [
            np.concatenate(
                [head, *(part.counts for part in banks)]
                + [words for part, wide in zip(banks, self._wide, strict=True) for words in _written(part, wide)]
            )
            for banks in asked
        ]

    def read(self, words: np.ndarray) -> Letter:
        """Return the letter in these words."""
        kind, number, *vote = words[:HEAD].tolist()
        letter = Letter(kind, number, Vote(*vote))
        if kind == ERROR:
            letter.text = words[HEAD + 1 :].tobytes()[: words[HEAD]].decode()
        elif kind == BATCH:
            at = self._counts[-1].stop
            for place, wide, type_of_rows in zip(self._counts, self._wide, self._types, strict=True):
                counts = words[place]
                rows, at = _read(words, at, counts, wide, type_of_rows)
                letter.banks.append(Requests(rows, counts))
        return letter


def _head(kind: int, number: int, vote: Vote) -> np.ndarray:
    return np.array([kind, number, min(vote.rows, _MOST), min(vote.memory, _MOST)], np.int32)


def _written(requests: Requests, wide: np.ndarray) -> list[np.ndarray]:
    """Return the lower 32 bits of all rows, then bits 32 to 47 of those of wide tables."""
    rows = requests.rows
    if rows.dtype == np.int32:
        return [rows]
    high = (rows[np.repeat(wide, requests.counts)] >> 32).astype(np.uint16)
    return [rows.astype(np.uint32).view(np.int32), _padded(high)]


def _read(
    words: np.ndarray, at: int, counts: np.ndarray, wide: np.ndarray, kind: type[np.int32] | type[np.int64]
) -> tuple[np.ndarray, int]:
    """Return the rows of one bank, and where those of the next begin."""
    count = sum(counts.tolist())  # np.sum takes longer for so few
    low = words[at : at + count]
    at += count
    if kind is np.int32:
        return low, at
    rows = low.view(np.uint32).astype(np.int64)
    many = int(counts[wide].sum())
    high = words[at : at + (many + 1) // 2].view(np.uint16)[:many]
    rows[np.repeat(wide, counts)] |= high.astype(np.int64) << 32
    return rows, at + (many + 1) // 2


def _padded(part: np.ndarray) -> np.ndarray:
    """Return an array as int32, padded with zeros."""
    out = np.zeros(-(-part.nbytes // 4), np.int32)
    out.view(part.dtype)[: len(part)] = part
    return out
