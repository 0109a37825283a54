"""The readers' benchmark, small: its counts, never its speed."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from skirl.data.files.dataset import Dataset
from skirl.measure.bench.readers import Readers, criteo_lines, resident_mb
from tests.data.files.test_text import is_right


def test_it_reads_each_form() -> None:
    result = Readers(samples=3000, peer_samples=200, batch=256, rounds=1, stream_gb=0).run()
    assert set(result["rows_per_s"]) == {"text", "converted", "fingerprints"} and result["memory"] is None


@pytest.mark.parametrize("leaks", [False, True], ids=["as it is", "a reader that keeps what it reads"])
def test_memory_stays_flat(leaks: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """For 100 MB of text it may grow by 10 MB; a reader that kept its columns would grow by more than the text."""
    kept, read = [], Dataset.read
    if leaks:
        monkeypatch.setattr(Dataset, "read", lambda self, *which: kept.append(raw := read(self, *which)) or raw)
    text = tmp_path / "day_0.tsv"
    text.write_bytes(b"".join(criteo_lines(10_000, 0)))
    memory = Readers(samples=10_000, batch=1024, stream_gb=0.1)._memory(str(text))
    assert memory["gb"] > 0.08
    assert (memory["slope_mb_per_gb"] < 100 and memory["last_mb"] - memory["first_mb"] < 10) != leaks, memory


def test_resident_memory_is_counted_in_the_pages_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    (kib,) = re.findall(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert resident_mb() == pytest.approx(int(kib) / 1024, rel=0.1)
    page = os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 16 * page}.__getitem__)
    assert resident_mb() == pytest.approx(16 * int(kib) / 1024, rel=0.1)


def test_its_lines_are_criteo() -> None:
    lines = criteo_lines(50, seed=1)
    assert len(lines) == 50 and all(is_right(line.rstrip(b"\n")) for line in lines)
    assert lines == criteo_lines(50, seed=1) != criteo_lines(50, seed=2)
