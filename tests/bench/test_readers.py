"""The readers' benchmark, small: what it counts, never how fast it is."""

from skirl.bench.readers import Readers, criteo_lines
from tests.data.test_malformed import is_right


def test_it_reads_each_form_and_memory_stays_flat() -> None:
    result = Readers(samples=3000, peer_samples=200, batch=256, rounds=1, stream_gb=0.02).run()
    assert set(result["rows_per_s"]) == {"text", "converted", "fingerprints"}
    memory = result["memory"]
    assert memory["gb"] > 0.015
    assert memory["last_mb"] - memory["first_mb"] < 60, memory


def test_its_lines_are_criteo() -> None:
    lines = criteo_lines(50, seed=1)
    assert len(lines) == 50 and all(is_right(line.rstrip(b"\n")) for line in lines)
    assert lines == criteo_lines(50, seed=1) != criteo_lines(50, seed=2)
