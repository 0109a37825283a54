"""Messages between ranks: arrays come back whole, and bytes that are not a message are refused before any allocation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from skirl.peers.message import HEAD, heads, pack, read_head, unpack
from tests.cases import cases

KINDS = st.sampled_from(["<i8", "<i4", "|u1", "|b1", "<f4", "<f8", "<u2"])
ARRAYS = st.lists(KINDS.flatmap(lambda kind: arrays(kind, st.integers(0, 20))), max_size=4)


@cases(20)
@given(ARRAYS)
def test_packed_arrays_come_back(parts):
    back = unpack(pack(*parts))
    assert [(part.dtype, part.tobytes()) for part in back] == [(part.dtype, part.tobytes()) for part in parts]
    assert all(part.flags.aligned for part in back)


@cases(60)
@given(ARRAYS, st.data())
def test_a_changed_message_is_refused_or_read_within_its_bounds(parts, data):
    raw = pack(*parts).copy()
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, min(len(raw), 300) - 1))] = data.draw(st.integers(0, 255))
    cut = raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw
    try:
        back = unpack(cut)
    except ValueError:
        return
    assert sum(part.nbytes for part in back) <= len(cut)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("dtype", b"|O", "no kind of numbers"), ("dtype", b"i4,i4", "no kind of numbers"), ("dtype", b"{", "no kind"),
     ("bytes", -8, "-8 bytes"), ("bytes", 7, "7 bytes are not a whole number")],
)  # fmt: skip
def test_a_head_that_is_none_is_refused(name, value, said):
    raw = heads([np.zeros(3, np.int64)], 1, "ids")[0]
    raw.view(HEAD)[name] = value
    with pytest.raises(ValueError, match=said):
        read_head(raw)
