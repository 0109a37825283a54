"""The disk benchmark: it measures what it claims, on rows that come back, and leaves nothing behind."""

import json

import pytest

from skirl.cli import main
from skirl.measure.bench.disk import Disk


def test_it_measures_and_leaves_nothing_behind(tmp_path, capsys):
    folder = tmp_path / "a" / "b"
    flags = "--rows 5000 --width 4 --batch 300 --calls 2 --overwrite 3 --json"
    assert main(["bench", "disk", "--folder", str(folder), *flags.split()]) == 0
    result = json.loads(capsys.readouterr().out)
    assert not folder.exists()
    assert (result["bench"], result["rows"], result["record_bytes"]) == ("disk", 5000, 16)
    store = result["store"]
    for name in ("fill", "read_cold", "read_warm", "overwrite"):
        assert store[name]["rows_s"] > 0 and store[name]["mb_s"] == pytest.approx(
            store[name]["rows_s"] * 16e-6, abs=0.1
        )
    # A record of 16 bytes adds 4 of checksum and 8 of key. Small segments have enough slack that none is cleaned.
    assert store["overwrite"]["amplification"] == pytest.approx(28 / 16, abs=0.1)
    assert store["index_bytes_a_row"] > 6
    assert min(result["ratios"].values()) >= 0 and min(result["device"].values()) > 0


def test_the_summary_names_all(tmp_path):
    bench = Disk(tmp_path / "new", rows=1000, width=2, batch=100, calls=1, overwrite=0.5)
    lines = bench.summary(bench.run())
    assert lines["rows"].startswith("1,000 of 8 bytes") and "rows/s cold" in lines["pread"]
    assert {"fill", "read_cold", "read_warm", "overwrite", "written", "durable", "ratios"} <= lines.keys()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"rows": 0}, "rows is 0: set it to 1 or more"),
        ({"batch": 2_000_000}, "batch is 2000000, there are 1000000 rows: set batch to 1000000 or less"),
        ({"overwrite": -1}, "overwrite is -1: set it to 0 or more"),
    ],
)
def test_wrong_flags(flags, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        Disk(tmp_path / "new", **flags)


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    with pytest.raises(ValueError, match="which exists: name one that does not"):
        Disk(tmp_path)
