"""Public traces in their own formats are converted to the arrays that the benchmark reads."""

import bz2
import gzip
import importlib.util
import lzma
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "make_trace.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_trace", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "dtype", "pack"),
    [
        ("a.i64be.xz", ">i8", lzma.compress),
        ("a.i32le.bz2", "<i4", bz2.compress),
        ("a.u16be.gz", ">u2", gzip.compress),
        ("a.i64le", "<i8", bytes),
    ],
)
def test_a_raw_trace_is_decoded_by_its_name(script, tmp_path, name, dtype, pack):
    ids = np.array([1, 2, 30_000, 2], dtype)
    (tmp_path / name).write_bytes(pack(ids.tobytes()))
    decoded = script.decode(tmp_path / name)
    assert decoded.dtype == np.int64 and decoded.tolist() == [1, 2, 30_000, 2]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.bin", b"", "rename it"),
        ("a.i32le", b"12345", "no whole number of 4-byte ids"),
        ("a.u64le", b"\xff" * 8, "renumber them first"),
    ],
)
def test_what_cannot_be_decoded_is_refused(script, tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=says):
        script.decode(tmp_path / name)


def test_zipf_draws_by_the_law_and_repeats_with_its_seed(script):
    ids = script.zipf(200_000, rows=1_000, exponent=1.1, seed=4)
    assert ids.min() >= 0 and ids.max() < 1_000
    chance = np.arange(1, 1_001) ** -1.1
    chance /= chance.sum()
    seen = np.bincount(ids, minlength=1_000) / len(ids)
    spread = np.sqrt(chance * (1 - chance) / len(ids))
    assert np.abs((seen - chance) / spread).max() < 5
    assert np.array_equal(ids, script.zipf(200_000, 1_000, 1.1, 4))
    assert not np.array_equal(ids, script.zipf(200_000, 1_000, 1.1, 5))


def test_the_script_writes_a_file(tmp_path):
    flags = ["zipf", str(tmp_path / "z.npy"), "--accesses", "100", "--rows", "10"]
    done = subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, check=True)
    assert "100 accesses" in done.stdout
    assert np.load(tmp_path / "z.npy").shape == (100,)
