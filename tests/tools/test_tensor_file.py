"""Tensors in files: compared with safetensors' own reader, in pieces of any size, and damaged at any byte."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from skirl.tools.sealed_json import CheckpointError
from skirl.tools.tensor_file import TensorReader, TensorWriter, bytes_of
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


def write(path: Path, tensors: dict[str, np.ndarray], piece: int = 4) -> dict[str, Any]:
    """Write the tensors in turns, one piece at a time."""
    columns = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    with TensorWriter(path, columns, {"about": "a test"}) as writer:
        for start in range(0, max(len(t) for t in tensors.values()), piece):
            for name, tensor in tensors.items():
                writer.write(name, tensor[start : start + piece])
    return writer.entry


@given(tensors=tensors_of(), written=st.integers(1, 10), read=st.integers(1, 10))
@cases(100)
def test_what_is_written_is_read_by_both(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, np.ndarray], written: int, read: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    entry = write(folder / "t", tensors, written)
    plain = load_file(folder / "t")
    reader = TensorReader(folder, entry)
    reader.check()
    assert reader.columns.keys() == plain.keys() == tensors.keys()
    assert (folder / "t").stat().st_size == entry["bytes"] >= bytes_of(reader.columns)
    pieces = list(reader.pieces(list(tensors), read))
    for k, (name, tensor) in enumerate(tensors.items()):
        for found in (plain[name], reader.whole(name)):
            assert found.dtype == tensor.dtype and np.array_equal(found, tensor)
        assert [len(parts[k]) for parts in pieces] == [len(tensor[i : i + read]) for i in range(0, len(tensor), read)]
        assert all(np.array_equal(parts[k], tensor[i * read :][:read]) for i, parts in enumerate(pieces))


@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@cases(60)
def test_a_flipped_bit_anywhere_is_found(tmp_path_factory: pytest.TempPathFactory, at: float, bit: int) -> None:
    folder = tmp_path_factory.getbasetemp()
    entry = write(folder / "t", {"keys": np.arange(6), "rows": np.ones((6, 3), np.float32)})
    data = bytearray((folder / "t").read_bytes())
    data[int(at * len(data))] ^= 1 << bit
    (folder / "t").write_bytes(data)
    with pytest.raises(CheckpointError, match="t is damaged"):
        TensorReader(folder, entry).check()


@pytest.mark.parametrize("change", [b"", b"x"])
def test_a_file_of_another_size_is_refused(tmp_path: Path, change: bytes) -> None:
    entry = write(tmp_path / "t", {"x": np.arange(3)})
    data = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(data + change if change else data[:-1])
    with pytest.raises(CheckpointError, match=r"bytes, .* were written"):
        TensorReader(tmp_path, entry)
    (tmp_path / "t").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        TensorReader(tmp_path, entry)


def test_a_file_that_is_not_finished_is_not_there(tmp_path: Path) -> None:
    write(tmp_path / "t", {"x": np.arange(3)})
    before = (tmp_path / "t").read_bytes()
    with (
        pytest.raises(AssertionError, match="not every row"),
        TensorWriter(tmp_path / "t", {"x": (np.dtype(np.int64), (3,))}, {}) as w,
    ):
        w.write("x", np.arange(2))
    with pytest.raises(KeyError), TensorWriter(tmp_path / "t", {"x": (np.dtype(np.int64), (3,))}, {}):
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["t"] and (tmp_path / "t").read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [{"file": "../t"}, {"columns": {"x": ["float16", [3]]}}, {"columns": {"x": ["int64", [-3]]}}, {"sha256": {}}],
)
def test_an_entry_that_describes_no_file_of_ours_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    entry = write(tmp_path / "t", {"x": np.arange(3)})
    with pytest.raises(CheckpointError):
        TensorReader(tmp_path, entry | change)
