"""Planning divided by key over several trainers: what each reads and what each owner is asked for, and the letters that they
exchange about it. An owner joins the requests of all, in rank order, into a batch to plan, whose positions are requests."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from skirl.core.ids import BankIds, Ids, positions_of
from skirl.core.keys import ROW_BITS
from skirl.core.placement import Owner, Placement, site_in, sites_of
from skirl.core.tables import Schema
from skirl.oracle.distinct import Finder
from skirl.oracle.planner import Vote
from skirl.tools.jit import kernel, read_only
from skirl.tools.message import pack, unpack

log = logging.getLogger("skirl")
LOOKED_AT = 4
"""Batches after which trainers that all read the same data are warned."""
FEWEST = 64
"""Fewest requests for rows in these batches for a warning: with fewer, trainers may be alike by chance."""


@dataclass(slots=True)
class Reads:
    """What one trainer reads of one bank in one step, from a buffer ordered by owner, then table, then last
    position."""

    place: np.ndarray
    """int32 [ids]: the index in the buffer of every id's row."""
    group_start: np.ndarray
    """int32 [rows + 1]: where each row's positions begin in `group_pos`."""
    group_pos: np.ndarray
    """int32 [ids]: positions grouped by row, ascending in each group."""
    ask: np.ndarray
    """int32 [owners + 1]: where the rows of each owner begin. Ids and gradients go to the owner, and values come back."""


def sent(ids: Ids, features: Sequence[str]) -> list[np.ndarray]:
    """Return the bags of some features of a micro-batch in five arrays, for the trainer that looks them up for all."""
    places = [ids.keys.index(name) for name in features]
    starts, inverse = [ids.starts(p) for p in places], [ids.inverse[p] for p in places]
    bags = [-1 if own is None else len(start) - 1 for own, start in zip(inverse, starts)]
    here = [slice(int(start[0]), int(start[-1])) for start in starts]
    weights = np.empty(0, np.float32) if ids.weights is None else np.concatenate([ids.weights[at] for at in here])
    head = np.array([ids.samples, ids.weights is not None, *bags], np.int32)
    lengths, values = _joined([np.diff(start) for start in starts]), _joined([ids.values[at] for at in here])
    return [head, lengths, values, weights, _joined([own for own in inverse if own is not None])]


def received(arrays: Sequence[np.ndarray], schema: Schema, bank: int) -> Ids:
    """Return the micro-batch that `sent` took, with the ids of this bank alone, which their trainer has checked."""
    head, lengths, values, weights, inverse = arrays
    samples, weighted, *bags = head.tolist()
    first = np.cumsum([0, *(samples if n < 0 else n for n in bags)])
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    each = iter(inverse.astype(np.int32).reshape(-1, max(1, samples)))
    of = tuple(None if n < 0 else next(each) for n in bags)
    names = tuple(feature.name for feature in schema.banks[bank].features)
    ids = Ids(names, values, offsets, samples, first, of, weights if weighted else None)
    ids.banks = [BankIds(ids.values, np.zeros((0, 4), np.int64)) for _ in schema.banks]
    ids.banks[bank] = positions_of(ids, schema, bank, checked=True)
    return ids


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays).astype(np.int64, copy=False) if arrays else np.empty(0, np.int64)


def _narrow(numbers: np.ndarray) -> np.ndarray:
    """Return numbers that are not negative in as few bytes as hold them, after a byte that says how many."""
    width = max(1, -(-int(numbers.max(initial=0)).bit_length() // 8))
    planes = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, 8)[:, :width].T  # all lowest bytes, then the next
    return np.concatenate([np.array([width], np.uint8), planes.reshape(-1)])


def _wide(narrow: np.ndarray) -> np.ndarray:
    planes = narrow[1:].reshape(int(narrow[0]), -1)
    numbers = np.empty(planes.shape[1], np.int64)
    _join(read_only(planes), numbers)
    return numbers


@kernel
def _join(planes, numbers):
    for i in range(len(numbers)):
        numbers[i] = planes[0, i]
    for byte in range(1, len(planes)):
        for i in range(len(numbers)):
            numbers[i] |= np.int64(planes[byte, i]) << 8 * byte


Requests = tuple[np.ndarray, np.ndarray]
"""Row numbers, int64, table after table; and how many each table of the bank has, int32."""


def asked(finder: Finder, batch: BankIds, placement: Placement) -> tuple[Reads, list[Requests]]:
    """Return what the ids of one batch read, and what is asked of each owner."""
    tables, sites, distinct = finder.tables, placement.sites, finder.find(batch)
    total = distinct.total
    counts, ask = np.zeros((sites, len(tables)), np.int32), np.empty(sites + 1, np.int32)
    rows, moved = np.empty(total, np.int64), np.empty(total, np.int32)
    args: Any = (tables, distinct.found, distinct.low, distinct.first, *placement.arrays, counts, ask, rows, moved)
    _by_owner(*args)
    place, pos = np.empty(distinct.positions, np.int32), np.empty(distinct.positions, np.int32)
    start = np.zeros(total + 1, np.int32)
    _group(distinct.parts, distinct.part_at, distinct.first, distinct.row_of, moved, place, start, pos)
    each = zip(pairwise(ask.tolist()), counts, strict=True)
    return Reads(place, start, pos, ask), [(rows[begin:end], of) for (begin, end), of in each]


def joined(tables: np.ndarray, requests: Sequence[Requests]) -> tuple[BankIds, np.ndarray]:
    """Join what all trainers ask an owner for, in rank order, into a batch to plan. Also return where each one's
    begins, int32 [trainers + 1]. `Step.slots` has one slot for each request."""
    counts = np.concatenate([counts for _, counts in requests])
    parts, serve = np.zeros((len(counts), 4), np.int64), np.zeros(len(requests) + 1, np.int32)
    parts[:, 0], parts[:, 2] = np.tile(tables, len(requests)), np.cumsum(counts)
    parts[:, 1] = parts[:, 2] - counts
    serve[1:] = parts[len(tables) - 1 :: len(tables), 2]
    return BankIds(np.concatenate([rows for rows, _ in requests]), parts), serve


@kernel
def _by_owner(tables, found, low, first, salt, lasts, counts, ask, rows, moved):
    """Order distinct rows by owner. `counts` comes as zeros. `moved` gets the new index of each row, in the order of
    tables. Owners and places are unsigned. Otherwise each would be checked for wrapping around from the end."""
    owner, owners = np.empty(len(moved), np.uint32), len(counts)
    of_table = np.empty(owners, np.int32)
    for t in range(len(tables)):
        high = np.int64(tables[t]) << ROW_BITS
        mine, of = found[low[t] : low[t] + first[t + 1] - first[t]], owner[first[t] : first[t + 1]]
        for i in range(len(of)):
            of[i] = site_in(high | mine[i], salt, lasts)
        of_table[:] = 0
        for o in of:
            of_table[o] += 1
        for o in range(owners):
            counts[o, t] = of_table[o]
    at, n = np.empty((len(tables), owners), np.uint32), 0
    ask[0] = 0
    for o in range(owners):
        for t in range(len(tables)):
            at[t, o] = n
            n += counts[o, t]
        ask[o + 1] = n
    for t in range(len(tables)):
        mine, of = found[low[t] : low[t] + first[t + 1] - first[t]], owner[first[t] : first[t + 1]]
        to, place = at[t], moved[first[t] : first[t + 1]]
        for i in range(len(of)):
            n = to[of[i]]
            to[of[i]] = n + 1
            rows[n] = mine[i]
            place[i] = n


@kernel
def _group(parts, first_part, first, row_of, moved, place, start, pos):
    """Write the place of every position, and the positions of every row. `start` comes as zeros."""
    rows = len(start) - 1
    for t in range(len(first) - 1):
        mine = moved[first[t] : first[t + 1]]
        for part in range(first_part[t], first_part[t + 1]):
            begin = parts[part, 3]
            of = row_of[begin : begin + parts[part, 1] - parts[part, 0]]
            out = place[begin : begin + len(of)]
            for p in range(len(of)):
                i = mine[of[p]]
                out[p] = i
                start[i] += 1
    n = 0
    for i in range(rows):
        n += start[i]
        start[i] = n
    start[rows] = n
    # From the end: each row's positions fill its range downwards, which leaves `start` at its beginning.
    for p in range(len(place) - 1, -1, -1):
        n = start[place[p]] - 1
        start[place[p]] = n
        pos[n] = p


@dataclass(slots=True)
class Letter:
    vote: Vote
    arrays: Sequence[np.ndarray] = ()
    """What its receiver is asked for: the two of `Requests` for each bank, and bags of tables that it looks up for all, as
    `sent` returns them. Empty if there are no more batches."""
    text: str = ""
    """Why the sender cannot go on, if it cannot."""

    def packed(self) -> np.ndarray:
        """Numbers of 64 bits are row numbers, ids and counts, none below 0: they travel in as few bytes as hold them."""
        narrow = (_narrow(array) if array.dtype == np.int64 else array for array in self.arrays)
        return pack(np.array(self.vote, np.int64), np.frombuffer(self.text.encode(), np.uint8), *narrow)

    @classmethod
    def unpacked(cls, message: np.ndarray) -> "Letter":
        vote, text, *narrow = unpack(message)
        arrays = [_wide(array) if array.dtype == np.uint8 else array for array in narrow]
        return cls(Vote(*vote.tolist()), arrays, text.tobytes().decode())


Exchange = Callable[[list[np.ndarray]], list[np.ndarray]]
"""Gives each rank one message, by rank, and returns what each rank gave. Their sizes are sent along."""


class FailedElsewhere(RuntimeError): ...  # of skirl: commands print it without a traceback


@dataclass(slots=True)
class Joined:
    banks: list[BankIds]
    """By bank: what all ranks ask of this one; this is planned."""
    serve: list[np.ndarray]
    """By bank: int32 [ranks + 1], where each rank's requests begin."""
    reads: list[Any]
    """By bank: `Reads`, what this rank reads; None if one rank looks it up for all."""
    whole: list[list[Ids]]
    """By bank: the micro-batches of all ranks, if this one looks it up for all; else none."""
    votes: list[Vote]
    """By rank: votes on the window without this batch. Empty for a lone trainer, whose planner decides for itself."""


class Route:
    """The way of a pass's ids to the planner of their rows: that of a lone trainer is its own."""

    rank = 0

    def __init__(self) -> None:
        self.ended = False
        """True once the pass is over and no rank exchanges any more."""
        self.failure: BaseException | None = None
        """Why this rank cannot go on. All hear of it at the next exchange, and end."""

    def batch(self, banks: Sequence[BankIds], vote: Vote, micros: Sequence[Sequence[Ids]] = ()) -> Joined | None:
        """Exchange this rank's ids of the next batch, by bank. Return None if another rank had no more, which ends the
        pass. `vote` is this owner's vote on its window, which the batch has not entered. `micros`: by bank."""
        return Joined(list(banks), [], [], [], [])

    def end(self, vote: Vote) -> None:
        """Tell the others that this rank has no more batches."""

    def fail(self, error: BaseException) -> NoReturn:
        """Tell the others that this rank cannot go on, and raise the error."""
        raise error from None

    def tell(self, error: BaseException) -> None:
        """Let the next exchange tell all ranks of an error, and raise it then. Raise it now if there is none."""
        raise error


class SharedRoute(Route):
    """The exchanges of one rank in one pass: each owner plans what all ask of it."""

    def __init__(
        self, schemas: Sequence[tuple[Schema, Mapping[int, Owner]]], rank: int, placement: Placement, exchange: Exchange
    ) -> None:
        """`schemas`: with the rank that looks a table up for all, or those that do, by its number."""
        super().__init__()
        self.rank = rank
        self._banks = [(schema, bank) for schema, _ in schemas for bank in range(len(schema.banks))]
        owners = [whole.get(bank.tables[0]) for schema, whole in schemas for bank in schema.banks]
        self._owners = [() if owner is None else sites_of(owner) for owner in owners]
        self.number = 0
        self._alike, self._requests = placement.sites > 1, 0
        """Whether all ranks have asked this one for the same rows in the same order, in every batch so far; how many."""
        self._placement, self._size = placement, placement.sites
        self._exchange = exchange
        self._finders = [Finder(schema, bank) for schema, bank in self._banks]
        self._reads: list[Reads | None] = []
        self._own: Letter
        """What this rank asks of itself, which takes no message."""

    def batch(self, banks: Sequence[BankIds], vote: Vote, micros: Sequence[Sequence[Ids]] = ()) -> Joined | None:
        if self.ended:
            return None
        return self.answer(self._exchange(self.ask(banks, vote, micros)))

    def end(self, vote: Vote) -> None:
        if not self.ended:
            self.answer(self._exchange(self.ask(None, vote)))

    def tell(self, error: BaseException) -> None:
        if self.ended:
            raise error
        self.failure = error

    def fail(self, error: BaseException) -> NoReturn:
        self.failure = error
        self.end(Vote(0, 0))  # raises, if others wait
        raise error

    def ask(
        self, banks: Sequence[BankIds] | None, vote: Vote, micros: Sequence[Sequence[Ids]] = ()
    ) -> list[np.ndarray]:
        """Return what to give each rank, the first half of an exchange. If `banks` is None, there is no batch."""
        self._reads = []
        if self.failure is not None:
            letters = [Letter(vote, text=str(self.failure) or repr(self.failure))] * self._size
        elif banks is None:
            letters = [Letter(vote)] * self._size
        else:
            arrays: list[list[np.ndarray]] = [[] for _ in range(self._size)]
            for finder, part, owners in zip(self._finders, banks, self._owners, strict=True):
                nothing = [(np.empty(0, np.int64), np.zeros(len(finder.tables), np.int32))] * self._size
                reads, each = (None, nothing) if owners else asked(finder, part, self._placement)
                self._reads.append(reads)
                for to, requests in zip(arrays, each, strict=True):
                    to += requests
            for each in zip(*micros):  # a micro-batch of each bank
                for (schema, bank), owners, ids in zip(self._banks, self._owners, each):
                    bags = sent(ids, [feature.name for feature in schema.banks[bank].features]) if owners else []
                    for owner in owners:
                        arrays[owner] += bags
            letters = [Letter(vote, to) for to in arrays]
        self._own, nothing = letters[self.rank], np.empty(0, np.uint8)
        return [nothing if rank == self.rank else letter.packed() for rank, letter in enumerate(letters)]

    def answer(self, given: Sequence[np.ndarray]) -> Joined | None:
        """Take what each rank gave this one, the second half of an exchange. Return None if the pass is over."""
        letters = [self._own if rank == self.rank else Letter.unpacked(message) for rank, message in enumerate(given)]
        for rank, letter in enumerate(letters):
            if letter.text:
                self.ended = True
                if self.failure is None:
                    raise FailedElsewhere(f"rank {rank}: {letter.text}")
                self.failure.args = (f"rank {self.rank}: {self.failure}", *self.failure.args[1:])
                raise self.failure
        if not all(letter.arrays for letter in letters):
            self.ended = True
            return None
        self.number += 1
        all_of = Joined([], [], self._reads, [], [letter.vote for letter in letters])
        at, each = 2 * len(self._banks), 5 * sum(self.rank in owners for owners in self._owners)
        for number, ((schema, bank), owners) in enumerate(zip(self._banks, self._owners)):
            requests = [(letter.arrays[2 * number], letter.arrays[2 * number + 1]) for letter in letters]
            batch, serve = joined(self._finders[number].tables, requests)
            micros = list[Ids]()
            if self.rank in owners:
                places = [(letter.arrays, i) for letter in letters for i in range(at, len(letter.arrays), each)]
                micros = [received(arrays[i : i + 5], schema, bank) for arrays, i in places]
                batch = BankIds.joined([ids.banks[bank] for ids in micros])
                at += 5
            all_of.banks.append(batch)
            all_of.serve.append(serve)
            all_of.whole.append(micros)
            self._requests += int(serve[-1])
        self._warn_if_alike([letter.arrays for letter in letters])
        return all_of

    def _warn_if_alike(self, arrays: Sequence[Sequence[np.ndarray]]) -> None:
        self._alike = self._alike and all(
            np.array_equal(one, other) for rank in arrays[1:] for one, other in zip(rank, arrays[0])
        )
        if self._alike and self.number == LOOKED_AT and self._requests >= FEWEST and self.rank == 0:
            log.warning(
                "all trainers have read the same ids in the first %d steps: give each its own shards of every batch, by "
                "skirl.ShardSampler or stream.sharded",
                LOOKED_AT,
            )
