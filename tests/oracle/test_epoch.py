"""The future of the whole epoch, compared with a search for each next use."""

from contextlib import closing

from hypothesis import given
from hypothesis import strategies as st

from skirl.oracle.epoch import Epoch
from skirl.oracle.loops import NEVER
from tests.cases import cases
from tests.oracle import brute
from tests.oracle.traces import SCHEMA, keys_of, traces, two_banks


def first_pass(trace: list[list[int]]) -> Epoch:
    epoch = Epoch([SCHEMA])
    for batch in two_banks(trace):
        epoch.add(batch)
    epoch.scan()
    return epoch


@cases(150)
@given(trace=traces(), residents=st.lists(st.integers(0, 20), unique=True))
def test_next_uses(trace, residents):
    sides = [[batch[bank].tolist() for batch in two_banks(trace)] for bank in (0, 1)]

    def following(bank: int, key: int, number: int) -> int:
        return next((n for n in range(number, len(trace)) if key in sides[bank][n]), int(NEVER))

    with closing(first_pass(trace)) as epoch:
        keys = keys_of(residents)
        assert epoch.first_uses(0, keys).tolist() == [following(0, key, 0) for key in keys.tolist()]
        for number in range(len(trace)):
            found = epoch.next_uses(number)
            for bank in (0, 1):
                rows = brute.distinct(sides[bank][number])
                assert found[bank].tolist() == [following(bank, key, number + 1) for key in rows]


def test_close_gives_the_file_back():
    epoch = first_pass([[1]])
    epoch.close()
    assert epoch.file.closed
