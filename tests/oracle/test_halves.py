"""A trainer's half of a step, its requests, and their encoding, compared with plain Python."""

from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skirl import Table
from skirl.core.placement import Placement
from skirl.core.positions import Positions
from skirl.core.tables import ROW_BITS, Schema
from skirl.oracle.halves import Asking, Requests, joined
from skirl.oracle.options import Vote
from skirl.oracle.route import BATCH, Letter, Letters
from tests.cases import cases
from tests.oracle.trainers import BANKS, SCHEMA, TABLES, asked, positions, random_ids

ALL = [(SCHEMA, bank) for bank in range(len(BANKS))]


@cases(60)
@given(seed=st.integers(0, 1 << 30), ranks=st.integers(1, 8))
def test_what_a_trainer_reads(seed, ranks):
    batch = random_ids(np.random.default_rng(seed), most=30)
    placement = Placement.even(ranks)
    for bank, part in enumerate(batch):
        reads, given_to = Asking(SCHEMA, bank, placement).of(positions(part))
        rows = [asked(part, owner, placement) for owner in range(ranks)]
        buffer = [key for of in rows for key in of]
        assert [buffer[place] for place in reads.place.tolist()] == part
        assert reads.ask.tolist() == np.cumsum([0, *map(len, rows)]).tolist()
        places = defaultdict(list)
        for place, key in enumerate(part):
            places[key].append(place)
        groups = np.split(reads.group_pos, reads.group_start[1:-1])
        assert [group.tolist() for group in groups][: len(buffer)] == [places[key] for key in buffer]
        assert (
            reads.group_start[0] == 0
            and reads.group_start[-1] == len(part)
            and len(reads.group_start) == len(buffer) + 1
        )
        assert all(getattr(reads, name).dtype == np.int32 for name in reads.__slots__)
        for of, requests in zip(rows, given_to, strict=True):
            assert requests.rows.tolist() == [key & ((1 << ROW_BITS) - 1) for key in of]
            assert requests.counts.tolist() == [sum(key >> ROW_BITS == t for key in of) for t in BANKS[bank]]


def test_features_of_one_table_in_any_order():
    """Positions are numbered in the order of the parts, whatever their tables."""
    schema = Schema.of([Table("a", 10, 4), Table("b", 10, 4)])
    parts = [[1, 0, 2, 0], [0, 2, 4, 0], [1, 4, 6, 0]]
    reads, given_to = Asking(schema, 0, Placement.even(1)).of(Positions(np.array([3, 4, 5, 6, 3, 7]), np.array(parts)))
    assert given_to[0].rows.tolist() == [5, 6, 4, 3, 7] and given_to[0].counts.tolist() == [2, 3]
    assert reads.place.tolist() == [3, 2, 0, 1, 3, 4]
    assert reads.group_pos.tolist() == [2, 3, 1, 0, 4, 5]


@cases(50)
@given(seed=st.integers(0, 1 << 30), ranks=st.integers(1, 5), owner=st.integers(0, 2))
def test_what_is_asked_arrives_as_it_was_written(seed, ranks, owner):
    rng = np.random.default_rng(seed)
    batch = [random_ids(rng) for _ in range(ranks)]
    placement, letters = Placement.even(3), Letters(ALL)
    received = []
    for part in batch:
        halves = [Asking(SCHEMA, bank, placement).of(positions(part[bank])) for bank in range(len(BANKS))]
        sent = Letter(BATCH, 7, Vote(3, 1 << 40), [given_to[owner] for _, given_to in halves])
        words = letters.write(sent)
        every = letters.write_batch(7, sent.vote, list(zip(*(given_to for _, given_to in halves), strict=True)))
        assert len(every) == 3 and every[owner].tolist() == words.tolist()
        assert words.dtype == np.int32
        received.append(letters.read(words))
        assert (received[-1].kind, received[-1].number, received[-1].vote) == (BATCH, 7, (3, 2**31 - 1))
        assert len(words) == 4 + len(TABLES) + sum(
            _words(bank, asked(part[bank], owner, placement)) for bank in range(3)
        )
    for bank, tables in enumerate(BANKS):
        together, serve = joined(np.array(tables), [letter.banks[bank] for letter in received])
        wanted = [asked(part[bank], owner, placement) for part in batch]
        assert together.keys().tolist() == [key for of in wanted for key in of]
        assert serve.tolist() == np.cumsum([0, *map(len, wanted)]).tolist() and serve.dtype == np.int32
        assert together.values.dtype == (np.int32 if tables == (0, 2, 3) else np.int64)


def _words(bank: int, keys: list[int]) -> int:
    return len(keys) * (2 if any(TABLES[t][1] > 2**31 for t in BANKS[bank]) else 1)


def test_rows_at_the_edges_of_their_words():
    schema = Schema.of([Table("wide", 1 << 48, 4), Table("narrow", 1 << 31, 4), Table("between", (1 << 31) + 1, 4)])
    rows = np.array([0, 2**31, 2**32 - 1, 2**32, 2**48 - 1, 2**31 - 1, 2**31, 2**31 - 1])
    letters, counts = Letters([(schema, 0)]), np.array([5, 1, 2], np.int32)
    letter = letters.read(letters.write(Letter(BATCH, 0, Vote(0, 0), [Requests(rows, counts)])))
    assert letter.banks[0].rows.tolist() == rows.tolist() and letter.banks[0].counts.tolist() == counts.tolist()
