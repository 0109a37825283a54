"""Arrays in shared memory reach a process that was forked before they existed, each in its own slot."""

import os

import numpy as np
import pytest

from skirl.tools.shared_slots import SharedSlots


def test_a_forked_process_sees_what_is_put_later() -> None:
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    slots = SharedSlots(3, 4096)
    first, second = np.arange(12).reshape(3, 4), np.linspace(0, 1, 5, dtype=np.float32)
    (here, there), (read, write) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.read(here, 1)
            a, none, b, strided = slots.get(LAYOUT)
            assert a is not None and none is None and b is not None and strided is not None
            good = np.array_equal(a, first) and np.array_equal(b, second) and np.array_equal(strided, first[:, ::2])
            os.write(write, bytes([good]))
        finally:
            os._exit(0)
    layout = slots.put(2, [first, None, second, first[:, ::2]])
    assert layout == LAYOUT
    os.write(there, b"x")
    assert os.read(read, 1) == b"\x01"
    os.waitpid(child, 0)
    for one in (here, there, read, write):
        os.close(one)


LAYOUT = (("<i8", (3, 4), 8192), None, ("<f4", (5,), 8320), ("<i8", (3, 2), 8384))


def test_what_does_not_fit_is_not_written() -> None:
    slots = SharedSlots(2, 128)
    layout = slots.put(1, [np.full(16, 7, np.int64)])
    assert layout is not None
    assert slots.put(0, [np.zeros(8, np.int64), np.zeros(9, np.int64)]) is None
    assert slots.put(0, [np.zeros(16, np.int64)]) is not None
    (kept,) = slots.get(layout)
    assert kept is not None and kept.tolist() == [7] * 16
