"""What `skirl bench dedup` says of files: it measures the same rows, and names its figures."""

from skirl.dedup.reading import read
from skirl.dedup.sizes import SETTINGS, stored, there, told_of


def test_sizes_of_each_order_and_layout() -> None:
    found = stored(400, 0.05, 1.0, (10,), None)
    writers = {f"{writer} {name}" for writer, given in SETTINGS.items() if there(writer) for name in given}
    assert all(set(of) == writers for of in found["bytes"].values())
    assert {"shuffled", "time_10", "clustered", "once", "once, shifting", "window, shifting"} == set(found["bytes"])
    sizes = {name: of["pyarrow zstd 3, no dictionary"] for name, of in found["bytes"].items()}
    assert sizes["once"] < sizes["shuffled"] and sizes["window, shifting"] < sizes["once, shifting"]
    once, window = found["once"], found["window"]
    assert once["vs_shuffled_default"] > 1 and set(once["vs_time_best"]) == {"10"} and window["vs_once"] > 1
    assert found["mind"] == "missing" and told_of(found)


def test_speeds_of_each_layout() -> None:
    found = read(200, 1.0, 1, "none")
    for name in ("vs_rows", "vs_shuffled"):
        assert set(found[name]) == {"4", "9"}
    assert (
        found["window"] > 0
        and found["shuffled_chunks"] > 0
        and set(found["rows_a_second"]["shifting"]) == {"rows", "once", "window", "shuffled"}
    )
