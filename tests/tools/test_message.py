"""Arrays come back from a message as they were packed, and what is no message is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from skirl.tools.message import HEAD, pack, unpack
from tests.cases import cases

KINDS = st.sampled_from(["<i8", "<i4", "|u1", "|b1", "<f4", "<f8", "<u2"])
ARRAYS = st.lists(KINDS.flatmap(lambda kind: arrays(kind, st.integers(0, 20))), max_size=4)


@cases(20)
@given(ARRAYS)
def test_packed_arrays_come_back(parts):
    back = unpack(pack(*parts))
    assert [(part.dtype, part.tobytes()) for part in back] == [(part.dtype, part.tobytes()) for part in parts]
    assert all(part.flags.aligned for part in back)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("dtype", b"|O", "no kind of numbers"), ("dtype", b"i4,i4", "no kind of numbers"), ("dtype", b"{", "no kind"),
     ("bytes", 7, "has 7 bytes"), ("bytes", 1 << 31, "and 24 are left")],
)  # fmt: skip
def test_a_message_with_a_wrong_head_is_refused(name, value, said):
    raw = pack(np.zeros(3))
    raw[: HEAD.itemsize].view(HEAD)[name] = value
    with pytest.raises(ValueError, match=said):
        unpack(raw)


def test_a_message_cut_short_is_refused():
    raw = pack(np.zeros(4), np.zeros(4))
    with pytest.raises(ValueError, match="are no array"):
        unpack(raw[: HEAD.itemsize + 32 + 5])
