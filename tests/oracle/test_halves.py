"""A trainer's half of a step, its requests, and their encoding, compared with plain Python."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skirl import Table
from skirl.core.placement import Placement
from skirl.core.tables import Schema
from skirl.oracle.options import Vote
from skirl.oracle.route import BATCH, Asking, Letter, Letters, Requests, joined
from tests.cases import cases
from tests.oracle.trainers import BANKS, SCHEMA, TABLES, asked, positions, random_ids

ALL = [(SCHEMA, bank) for bank in range(len(BANKS))]


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
        assert words.dtype == np.int32
        received.append(letters.read(words))
        assert (received[-1].kind, received[-1].number, received[-1].vote) == (BATCH, 7, (3, 2**31 - 1))
        rows = sum(_words(bank, asked(part[bank], owner, placement)) for bank in range(3))
        assert len(words) == 4 + len(TABLES) + rows
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
