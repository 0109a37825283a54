"""Planning divided by key over several trainers, and the letters that they exchange about it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from skirl.core.keys import Positions
from skirl.core.placement import Placement
from skirl.core.tables import Schema
from skirl.oracle.halves import Asking, Reads, Requests, joined, row_type
from skirl.oracle.options import Plan, Vote, due

BATCH, END, ERROR = 0, 1, 2
HEAD = 4


@dataclass(slots=True)
class Letter:
    kind: int
    """`BATCH`; `END`: there are no more; or `ERROR`: the sender cannot go on."""
    number: int
    """Number of batches that it told of before."""
    vote: Vote
    banks: Sequence[Requests] = ()
    text: str = ""


class Letters:
    """Letters begin with kind, number and vote (2 words). For a batch, the row counts of all tables of all banks follow,
    then the rows, as one word, or two in a bank with a table of more than 2**31 rows. For an error, its text follows."""

    def __init__(self, banks: Sequence[tuple[Schema, int]]) -> None:
        ends = HEAD + np.cumsum([0, *(len(schema.banks[bank].tables) for schema, bank in banks)])
        self._counts = [slice(begin, end) for begin, end in pairwise(ends.tolist())]
        self._types = [row_type(schema, bank) for schema, bank in banks]

    def write(self, letter: Letter) -> np.ndarray:
        rows, memory = (min(vote, 2**31 - 1) for vote in letter.vote)
        parts = [np.array([letter.kind, letter.number, rows, memory], np.int32)]
        parts += [part.counts for part in letter.banks]
        parts += [part.rows.view(np.int32) for part in letter.banks]
        if letter.kind == ERROR:
            text = letter.text.encode()
            padded = text.ljust(-(-len(text) // 4) * 4, b"\0")
            parts += [np.array([len(text)], np.int32), np.frombuffer(padded, np.int32)]
        return np.concatenate(parts)

    def read(self, words: np.ndarray) -> Letter:
        kind, number, *vote = words[:HEAD].tolist()
        letter = Letter(kind, number, Vote(*vote))
        if kind == ERROR:
            letter.text = words[HEAD + 1 :].tobytes()[: words[HEAD]].decode()
        elif kind == BATCH:
            banks, at = list[Requests](), self._counts[-1].stop
            for place, of_rows in zip(self._counts, self._types, strict=True):
                counts = words[place]
                count = sum(counts.tolist())  # np.sum takes longer for so few
                begin, at = at, at + count * np.dtype(of_rows).itemsize // 4
                rows = words[begin:at]
                banks.append(Requests(rows if of_rows is np.int32 else rows.copy().view(of_rows), counts))
            letter.banks = banks
        return letter


Exchange = Callable[[list[np.ndarray]], list[np.ndarray]]
"""Gives each rank one array of int32, by rank, and returns what each rank gave. Their sizes are sent along."""


class FailedElsewhere(RuntimeError): ...


@dataclass(slots=True)
class Joined:
    banks: list[Positions]
    """By bank: what all ranks ask of this one; this is planned."""
    serve: list[np.ndarray]
    """By bank: int32 [ranks + 1], where each rank's requests begin."""
    reads: list[Reads]
    """By bank: what this rank reads."""
    votes: list[Vote]
    """By rank: votes on the window without this batch."""


class Route:
    """The way of a pass's ids to the planner of their rows: that of a lone trainer is its own."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.number = 0
        self.due: int | None = None
        """Number of steps that all owners plan before the last batch to come enters, as `decide` has found. None: each
        planner decides for itself."""
        self.ended = False
        """True once the pass is over and no rank exchanges any more."""
        self.dropped = 0
        self.alike = False
        """True if all ranks have asked this one for the same rows in the same order, in every batch so far."""
        self.requests = 0
        self.failure: BaseException | None = None
        """Why this rank cannot go on. All hear of it at the next exchange, and end."""

    def batch(self, banks: Sequence[Positions], vote: Vote) -> Joined | None:
        """Exchange this rank's ids of the next batch, by bank. Return None if another rank had no more, which ends the
        pass. `vote` is this owner's vote on its window, which the batch has not entered."""
        return Joined(list(banks), [], [], [])

    def end(self, vote: Vote) -> None:
        """Tell the others that this rank has no more batches."""

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on, and raise the error."""
        raise error from None

    def tell(self, error: BaseException) -> None:
        """Let the next exchange tell all ranks of an error, and raise it then. Raise it now if there is none."""
        raise error

    def decide(self, plan: Plan, batch: Joined) -> None:
        """Decide how many steps all owners plan before this last batch enters. `plan` is the same on all ranks."""

    def step_planned(self) -> None:
        """Count one more step as planned, and one less as due."""


class SharedRoute(Route):
    """The exchanges of one rank in one pass: each owner plans what all ask of it."""

    def __init__(self, schemas: Sequence[Schema], rank: int, placement: Placement, exchange: Exchange) -> None:
        super().__init__(rank)
        banks = [(schema, bank) for schema in schemas for bank in range(len(schema.banks))]
        self.planned = 0
        self.due = 0
        self.alike = placement.sites > 1
        self._size = placement.sites
        self._exchange = exchange
        self._tables = [np.array(schema.banks[bank].tables, np.int64) for schema, bank in banks]
        self._asking = [Asking(schema, bank, placement) for schema, bank in banks]
        self._letters = Letters(banks)
        self._reads: list[Reads] = []

    def batch(self, banks: Sequence[Positions], vote: Vote) -> Joined | None:
        if self.ended:
            self.dropped += 1
            return None
        return self.answer(self._exchange(self.ask(banks, vote)))

    def end(self, vote: Vote) -> None:
        if not self.ended:
            self.answer(self._exchange(self.ask(None, vote)))

    def tell(self, error: BaseException) -> None:
        if self.ended:
            raise error
        self.failure = error

    def fail(self, error: BaseException) -> None:
        self.failure = error
        if self.ended:
            raise error
        self.end(Vote(0, 0))

    def ask(self, banks: Sequence[Positions] | None, vote: Vote) -> list[np.ndarray]:
        """Return what to give each rank, the first half of an exchange. If `banks` is None, there is no batch."""
        self._reads = []
        if self.failure is not None:
            letter = Letter(ERROR, self.number, vote, text=str(self.failure))
        elif banks is None:
            letter = Letter(END, self.number, vote)
        else:
            halves = [asking.of(part) for asking, part in zip(self._asking, banks, strict=True)]
            self._reads = [reads for reads, _ in halves]
            asked = zip(*(asked for _, asked in halves), strict=True)
            return [self._letters.write(Letter(BATCH, self.number, vote, banks)) for banks in asked]
        return [self._letters.write(letter)] * self._size

    def answer(self, given: Sequence[np.ndarray]) -> Joined | None:
        """Take what each rank gave this one, the second half of an exchange. Return None if the pass is over."""
        letters = [self._letters.read(words) for words in given]
        for rank, letter in enumerate(letters):
            if letter.kind == ERROR:
                self.ended = True
                raise self._named() or FailedElsewhere(f"rank {rank}: {letter.text}")
        for rank, letter in enumerate(letters):
            if letter.number != self.number:
                raise AssertionError(
                    f"rank {rank} is at batch {letter.number}, rank {self.rank} at {self.number}: this is a bug in skirl"
                )
        if any(letter.kind == END for letter in letters):
            self.ended = True
            self.dropped += letters[self.rank].kind == BATCH
            return None
        asked = list(zip(*(letter.banks for letter in letters), strict=True))
        both = [joined(tables, parts) for tables, parts in zip(self._tables, asked, strict=True)]
        self.number += 1
        self.alike = self.alike and all(np.array_equal(words[HEAD:], given[0][HEAD:]) for words in given[1:])
        self.requests += sum(int(part[-1]) for _, part in both)
        return Joined(
            [part for part, _ in both], [serve for _, serve in both], self._reads, [letter.vote for letter in letters]
        )

    def decide(self, plan: Plan, batch: Joined) -> None:
        self.due = due(plan, self.number - 1 - self.planned, self.planned, batch.votes)

    def step_planned(self) -> None:
        self.planned += 1
        self.due = max(0, (self.due or 0) - 1)

    def _named(self) -> BaseException | None:
        """Return why this rank cannot go on, with its rank in the message."""
        if self.failure is not None and self.failure.args:
            self.failure.args = (f"rank {self.rank}: {self.failure.args[0]}", *self.failure.args[1:])
        return self.failure
