"""Arrays come back from a message as they were packed."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from skirl.tools.message import pack, unpack
from tests.cases import cases

KINDS = st.sampled_from(["<i8", "<i4", "|u1", "|b1", "<f4", "<f8", "<u2"])
ARRAYS = st.lists(KINDS.flatmap(lambda kind: arrays(kind, st.integers(0, 20))), max_size=4)


@cases(20)
@given(ARRAYS)
def test_packed_arrays_come_back(parts):
    back = unpack(pack(*parts))
    assert [(part.dtype, part.tobytes()) for part in back] == [(part.dtype, part.tobytes()) for part in parts]
    assert all(part.flags.aligned for part in back)
