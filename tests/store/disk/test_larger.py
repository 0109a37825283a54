"""Rows on disk that take many times the memory that the process may use: `tests/store/disk/larger.py` enforces the limit.

SKIRL_DISK_GB=20 trains 20 GB of rows in 1 GB; it takes some minutes, and 22 GB of disk.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import skirl

ROOT = Path(__file__).parents[3]
SMALL = 0.4


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's RLIMIT_DATA and /proc")
def test_trains_rows_many_times_larger_than_memory(tmp_path):
    gigabytes = float(os.environ.get("SKIRL_DISK_GB", SMALL))
    # With few rows, torch and the compiler alone would take most of 1 GB, so only the memory on top of them counts.
    limit = ["--limit", "1024"] if gigabytes >= 5 else ["--above", str(int(60 + 45 * gigabytes))]
    command = [
        sys.executable,
        "-m",
        "tests.store.disk.larger",
        str(tmp_path / "rows"),
        "--gigabytes",
        str(gigabytes),
        *limit,
    ]
    source = Path(skirl.__file__).parents[1]
    env = os.environ | {
        "NUMBA_DISABLE_JIT": "0",
        "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)]),
        "MALLOC_ARENA_MAX": "2",  # or each thread's allocator keeps memory that it once used
    }
    done = subprocess.run([*command, "--batch", "4096"], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    print(result)
    assert result["gigabytes"] == pytest.approx(gigabytes, rel=0.01)
    assert result["rows_fetched"] > 0.05 * result["rows"]
    assert result["private_mib_at_most"] <= result["limit_mib"]
    assert result["rows_compared"] > 10_000 and result["rows_differing"] == 0
    assert result["index_bytes_a_row"] < 8 and result["disk_bytes_to_payload"] < 1.5
