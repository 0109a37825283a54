"""A trainer's half of a step, its requests, and their encoding, compared with plain Python."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skirl.core.placement import Placement
from skirl.oracle.options import Vote
from skirl.oracle.route import BATCH, Asking, Letter, Requests, joined
from tests.cases import cases
from tests.oracle.trainers import BANKS, SCHEMA, asked, positions, random_ids


@cases(50)
@given(seed=st.integers(0, 1 << 30), ranks=st.integers(1, 5), owner=st.integers(0, 2))
def test_what_is_asked_arrives_as_it_was_written(seed, ranks, owner):
    rng = np.random.default_rng(seed)
    batch = [random_ids(rng) for _ in range(ranks)]
    placement = Placement.even(3)
    received = []
    for part in batch:
        halves = [Asking(SCHEMA, bank, placement).of(positions(part[bank])) for bank in range(len(BANKS))]
        sent = Letter(BATCH, Vote(3, 1 << 40), [given_to[owner] for _, given_to in halves])
        received.append(Letter.unpacked(sent.packed(), len(BANKS)))
        assert (received[-1].kind, received[-1].vote) == (BATCH, (3, 1 << 40))
    for bank, tables in enumerate(BANKS):
        together, serve = joined(np.array(tables), [letter.banks[bank] for letter in received])
        wanted = [asked(part[bank], owner, placement) for part in batch]
        assert together.keys().tolist() == [key for of in wanted for key in of]
        assert serve.tolist() == np.cumsum([0, *map(len, wanted)]).tolist() and serve.dtype == np.int32
        assert together.values.dtype == (np.int32 if tables == (0, 2, 3) else np.int64)


def test_rows_at_the_edges_of_their_numbers():
    rows = np.array([0, 2**31, 2**32 - 1, 2**32, 2**48 - 1, 2**31 - 1, 2**31, 2**31 - 1])
    (part,) = Letter.unpacked(Letter(BATCH, Vote(0, 0), [Requests(rows, np.array([5, 1, 2]))]).packed(), 1).banks
    assert part.rows.tolist() == rows.tolist() and part.counts.tolist() == [5, 1, 2]
