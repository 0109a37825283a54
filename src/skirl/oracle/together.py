"""Planning of several trainers: each finds what it reads, and plans what all ask of the rows that it owns.

There is one exchange a batch. What it brings, and nothing else, decides what all do next: plan, enter the batch, or stop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from skirl.core.placement import Placement
from skirl.core.positions import Positions
from skirl.core.tables import Schema
from skirl.oracle.bank import BankPlanner, BatchTooLarge
from skirl.oracle.halves import Asking, Reads, Requests, joined
from skirl.oracle.letters import BATCH, END, ERROR, HEAD, Letter, Letters
from skirl.oracle.options import Plan
from skirl.oracle.planner import Planner
from skirl.oracle.reach import Vote, due
from skirl.oracle.step import Step
from skirl.tools.hash_index import distinct

Exchange = Callable[[list[np.ndarray]], list[np.ndarray]]
"""Gives each rank one array of int32, by rank, and brings what each rank gave; their sizes travel along."""


class FailedElsewhere(RuntimeError):
    """Another rank cannot go on: it says of itself why."""


@dataclass(slots=True)
class Joined:
    """A batch after its exchange."""

    banks: list[Positions]
    """By bank: what all ranks ask of this one, to be planned."""
    serve: list[np.ndarray]
    """By bank: int32 [ranks + 1], where each rank's requests begin."""
    reads: list[Reads]
    """By bank: what this rank reads."""
    votes: list[Vote]
    """By rank: of the window without this batch."""


class Together:
    """One rank's exchanges of one pass.

    **Arguments**

    - `schemas`: of each collection.
    - `rank`: of this trainer.
    - `placement`: who owns which rows; its sites are the ranks.
    - `exchange`: see `Exchange`; it is called for each batch and once more at the end.
    """

    def __init__(self, schemas: Sequence[Schema], rank: int, placement: Placement, exchange: Exchange) -> None:
        banks = [(schema, bank) for schema in schemas for bank in range(len(schema.banks))]
        self.rank = rank
        self.number = 0
        """Batches exchanged."""
        self.ended = False
        """Whether the pass is over: no rank exchanges any more."""
        self.dropped = 0
        """Batches of this rank that are left out, since another rank had no more."""
        self.alike = placement.sites > 1
        """Whether all ranks have asked this one for the same rows in the same order, in every batch so far."""
        self.requests = 0
        """Rows that all ranks have asked this one for."""
        self.failure: BaseException | None = None
        """What this rank cannot go on with. All hear of it at the next exchange, and end."""
        self._size = placement.sites
        self._exchange = exchange
        self._tables = [np.array(schema.banks[bank].tables, np.int64) for schema, bank in banks]
        self._asking = [Asking(schema, bank, placement) for schema, bank in banks]
        self._letters = Letters(banks)
        self._reads: list[Reads] = []

    def batch(self, banks: Sequence[Positions], vote: Vote) -> Joined | None:
        """Exchange this rank's ids of the next batch, by bank; None when another rank had no more: then all is over.

        `vote`: what this owner says of its window, which the batch has not entered.
        """
        if self.ended:
            self.dropped += 1
            return None
        return self.answer(self._exchange(self.ask(banks, vote)))

    def end(self, vote: Vote) -> None:
        """This rank has no more batches."""
        if not self.ended:
            self.answer(self._exchange(self.ask(None, vote)))

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on: tell all others, and raise it."""
        self.failure = error
        if self.ended:
            raise error
        self.end(Vote(0, 0))

    def ask(self, banks: Sequence[Positions] | None, vote: Vote) -> list[np.ndarray]:
        """The first half of an exchange: what to give each rank. None: there is no batch."""
        self._reads = []
        if self.failure is not None:
            letter = Letter(ERROR, self.number, vote, text=str(self.failure))
        elif banks is None:
            letter = Letter(END, self.number, vote)
        else:
            halves = [asking.of(part) for asking, part in zip(self._asking, banks, strict=True)]
            self._reads = [reads for reads, _ in halves]
            return self._letters.write_batch(self.number, vote, list(zip(*(asked for _, asked in halves), strict=True)))
        return [self._letters.write(letter)] * self._size

    def answer(self, given: Sequence[np.ndarray]) -> Joined | None:
        """The second half: what each rank gave this one."""
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
        asked: list[tuple[Requests, ...]] = list(zip(*(letter.banks for letter in letters), strict=True))
        both = [joined(tables, parts) for tables, parts in zip(self._tables, asked, strict=True)]
        self.number += 1
        self.alike = self.alike and all(np.array_equal(words[HEAD:], given[0][HEAD:]) for words in given[1:])
        self.requests += sum(int(part[-1]) for _, part in both)
        return Joined(
            [part for part, _ in both], [serve for _, serve in both], self._reads, [letter.vote for letter in letters]
        )

    def _named(self) -> BaseException | None:
        """What this rank cannot go on with, saying which rank it is."""
        if self.failure is not None and self.failure.args:
            self.failure.args = (f"rank {self.rank}: {self.failure.args[0]}", *self.failure.args[1:])
        return self.failure


Item = TypeVar("Item")

NextUses = Callable[[list[Positions]], list[np.ndarray]]
"""Of the requests of the next batch, by bank: the number of the next batch that uses each of their rows."""


class JointPlanner(Generic[Item]):
    """Plans all banks of one rank's rows, in step with all other ranks.

    `add` and `end` wait for the other ranks. After each, `next` is to be called until it gives None.

    **Arguments**

    - `together`: this rank's exchanges.
    - `banks`: the planners of this rank's rows.
    - `plan`: how far to read; the same on all ranks.
    - `next_uses`: for depth "epoch", what a first pass over the same batches has found.
    """

    def __init__(
        self, together: Together, banks: Sequence[BankPlanner], plan: Plan, next_uses: NextUses | None = None
    ) -> None:
        self.together = together
        self.planner: Planner[tuple[Item, Joined]] = Planner(banks, plan)
        self.planner.due = 0
        self._plan = plan
        self._next_uses = next_uses

    def add(self, item: Item, banks: Sequence[Positions], nbytes: int) -> None:
        """This rank's part of one more batch; `Planner.add` says what is what."""
        self.added(item, self.together.batch(banks, self.vote()), nbytes)

    def end(self) -> None:
        """This rank has no more batches."""
        self.together.end(self.vote())
        self.planner.end()

    def vote(self) -> Vote:
        """What to say with the next batch."""
        return self.planner.vote()

    def added(self, item: Item, batch: Joined | None, nbytes: int) -> None:
        """What `add` does after the exchange."""
        if batch is None:
            self.planner.end()
            return
        number = self.together.number - 1
        self.together.failure = self._too_large(number, batch.banks)
        planned = self.planner.end_number
        self.planner.due = due(self._plan, number - planned, planned, batch.votes)
        if self.together.failure is None:
            known = None if self._next_uses is None else self._next_uses(batch.banks)
            self.planner.add((item, batch), batch.banks, nbytes, known)

    def next(self) -> tuple[Item, Joined, list[Step]] | None:
        """The next batch and its Steps, one a bank; None until it is time for it, or when all is planned."""
        planned = self.planner.next()
        if planned is None:
            return None
        (item, batch), steps = planned
        return item, batch, steps

    def _too_large(self, number: int, batch: Sequence[Positions]) -> BatchTooLarge | None:
        """What a batch is refused with that this rank has no room for."""
        for bank, part in zip(self.planner.banks, batch, strict=True):
            if len(part) > bank.capacity and (needs := len(distinct(part.keys())[0])) > bank.capacity:
                return BatchTooLarge(number, needs, bank.capacity, bank.dim)
        return None
