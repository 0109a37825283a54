"""Results come in the order of the items, whichever thread finished first, and errors in place of their result."""

import threading
import time
from collections.abc import Iterator

import pytest

from skirl.train.predict import side_by_side


def test_two_items_are_worked_on_at_once_and_come_in_order() -> None:
    met = threading.Barrier(2, timeout=10)

    def work(n: int) -> int:
        met.wait()  # fails if a single thread does all the work
        time.sleep(0.002 if n % 2 == 0 else 0)
        return -n

    with side_by_side(work, iter(range(20)), 2) as results:
        assert list(results) == [-n for n in range(20)]


def test_an_error_comes_where_its_result_would_have_come() -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise KeyError("read")

    for work, error, before in ((lambda n: 1 // (3 - n), ZeroDivisionError, 3), (lambda n: n, KeyError, 5)):
        found = []
        with pytest.raises(error), side_by_side(work, items(), 3) as results:
            for result in results:
                found.append(result)
        assert len(found) == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("skirl-side")]


def test_who_leaves_early_leaves_nothing_behind() -> None:
    taken = []

    def items() -> Iterator[int]:
        for n in range(1000):
            taken.append(n)
            yield n

    with side_by_side(lambda n: n, items(), 2) as results:
        assert next(results) == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("skirl-side")]
    assert len(taken) < 10
