"""A plan's arrays packed into one buffer: each comes out as it went in."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from skirl.engine.device.transfers import ALIGNED, Packed
from tests.cases import cases

ARRAYS = st.sampled_from([np.int32, np.int64, np.float32, np.float64, np.bool_]).flatmap(
    lambda dtype: arrays(dtype, array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=7))
)


@given(st.dictionaries(st.text(max_size=3), ARRAYS, max_size=6))
@cases(200)
def test_arrays_come_out_as_they_went_in(given_arrays):
    packed = Packed(given_arrays)
    buffer = np.full(packed.nbytes + 8, 0xAB, np.uint8)
    packed.write(buffer)
    views = packed.views(torch.from_numpy(buffer))
    assert (buffer[packed.nbytes :] == 0xAB).all()
    assert list(views) == list(given_arrays)
    for name, array in given_arrays.items():
        assert views[name].shape == array.shape and views[name].numpy().dtype == array.dtype
        assert views[name].numpy().tobytes() == array.tobytes()
        assert array.size == 0 or (views[name].data_ptr() - torch.from_numpy(buffer).data_ptr()) % ALIGNED == 0
