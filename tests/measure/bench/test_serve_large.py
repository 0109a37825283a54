"""Memory of all processes while many times the caches' rows are touched: refusals, and a small run."""

import pytest

from skirl.measure.bench.serve_large import ServeLarge


def test_flags_that_do_not_fit(tmp_path):
    with pytest.raises(ValueError, match=r"folder is .* which exists: name one that does not"):
        ServeLarge(folder=tmp_path)
    with pytest.raises(ValueError, match="cache is 'much' is not a size"):
        ServeLarge(cache="much")


@pytest.mark.slow
def test_ten_times_the_caches_on_two_nodes_with_disks(tmp_path):
    flags = {"data": "synthetic:criteo-kaggle", "dim": 16, "batch": 256, "steps": 120, "cache": "1MB"}
    found = ServeLarge(**flags, folder=tmp_path / "rows").run()
    assert found["failed"] is None and found["times_cache"] >= 10 and found["fetched"] > 0
    assert not (tmp_path / "rows").exists()
    assert {"trainer 0", "trainer 1", "node 0, process 0", "node 1, process 2"} <= set(found["memory"])
    assert all(took > 0 for took in found["memory"].values())
