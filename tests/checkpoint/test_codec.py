"""Encoded values decode to the same types and the same bits."""

import json
import random
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from skirl.checkpoint.codec import decode, encode, with_metadata
from skirl.tools import rng_state
from tests.cases import cases

DTYPES = [torch.float64, torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool, torch.complex64]
tensors = st.builds(
    lambda dtype, shape, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 99),
)
arrays = st.builds(
    lambda dtype, shape: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype),
    st.sampled_from(["<f4", ">i8", "u4", "bool", "<U3", "m8[s]"]),
    st.lists(st.integers(0, 3), max_size=3),
)
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | tensors | arrays
    | st.sampled_from([np.float64(0.1), np.int8(-3), np.bool_(True)])
)  # fmt: skip
keys = st.integers() | st.text() | st.sampled_from(["~tensor", "~dict", "a.b"]) | st.tuples(st.integers(), st.text())
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner) | st.dictionaries(st.text(), inner)
    ),
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes() or (a != a and b != b)
    return a == b


def bytes_of(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


@cases(150)
@given(values)
def test_round_trip_through_files(value: Any) -> None:
    coded, held = encode(value, "x")
    again = decode(json.loads(json.dumps(coded, allow_nan=False)), load(save(held)))
    assert same(again, value)


def test_subclasses_of_dict() -> None:
    assert type(decode(*encode(OrderedDict(a=1), "x"))) is dict
    counts = decode(*encode(Counter([3, 3, 5]), "x"))
    assert type(counts) is Counter and counts[3] == 2 and counts[4] == 0


def test_tensors_are_copies_of_their_own() -> None:
    tied = torch.arange(6.0)
    value = [tied, tied, tied[::2], tied.view(2, 3).t(), torch.nn.Parameter(tied)]
    coded, held = encode(value, "x")
    expected = [tensor.detach().clone() for tensor in value]
    tied += 1
    assert all(map(torch.equal, decode(coded, load(save(held))), expected))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1, 2}, r"x\.k is of type builtins\.set"),
        (torch.eye(2).to_sparse(), r"x\.k is a torch\.sparse_coo tensor .* call zero_grad"),
        (torch.zeros(1, dtype=torch.complex128), r"x\.k is a torch\.strided tensor of torch\.complex128"),
        (np.array([None]), r"x\.k is an array of object"),
    ],
)
def test_other_values_are_refused_by_place(value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        encode({"k": value}, "x")


def test_metadata_of_a_module() -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    again = with_metadata(dict(state), state._metadata)  # type: ignore[attr-defined]
    assert again._metadata[""]["version"] == 2  # type: ignore[attr-defined]
    torch.nn.BatchNorm1d(3).load_state_dict(again)


def draws() -> list[float]:
    drawn = [torch.rand(1).item(), torch.randn(3).sum().item(), random.random(), random.gauss()]
    return [*drawn, np.random.rand(), np.random.randn()]  # noqa: NPY002


def test_restored_through_a_checkpoint() -> None:
    draws()  # leaves a second normal number pending in two of them
    coded = encode(rng_state.capture(), "x")
    expected = [draws() for _ in range(400)]  # past the point where the state words are regenerated
    rng_state.restore(decode(*coded))
    assert [draws() for _ in range(400)] == expected
