"""Tensors in files: compared with safetensors' own reader, in pieces of any size."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from skirl.tools.tensor_file import tensors_written
from tests.cases import cases

DTYPES = ["float32", "float64", "int64"]


@st.composite
def tensors_of(draw: Any) -> dict[str, np.ndarray]:
    """Draw tensors with equally many rows, some of them with none."""
    rows = draw(st.integers(0, 9))
    names = draw(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3, unique=True))
    draws = np.random.default_rng(draw(st.integers(0, 99)))
    shapes = [(rows, *draw(st.lists(st.integers(1, 3), max_size=2))) for _ in names]
    made = {n: draws.integers(0, 1 << 30, s).astype(draw(st.sampled_from(DTYPES))) for n, s in zip(names, shapes)}
    return {name: tensor for name, tensor in made.items() if name != "__metadata__"}


def write(path: Path, tensors: dict[str, np.ndarray], piece: int = 4) -> None:
    """Write the tensors in turns, one piece at a time."""
    columns = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    with tensors_written(path, columns, {"about": "a test"}) as writer:
        for start in range(0, max(len(t) for t in tensors.values()), piece):
            for name, tensor in tensors.items():
                writer.write(name, tensor[start : start + piece])


@given(tensors=tensors_of(), piece=st.integers(1, 10))
@cases(100)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, np.ndarray], piece: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "t"
    write(path, tensors, piece)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and np.array_equal(found[name], tensor)


def test_a_file_that_is_not_finished_is_not_there(tmp_path: Path) -> None:
    write(tmp_path / "t", {"x": np.arange(3)})
    before = (tmp_path / "t").read_bytes()
    with (
        pytest.raises(AssertionError, match="not every row"),
        tensors_written(tmp_path / "t", {"x": (np.dtype(np.int64), (3,))}, {}) as w,
    ):
        w.write("x", np.arange(2))
    assert [path.name for path in tmp_path.iterdir()] == ["t"] and (tmp_path / "t").read_bytes() == before
