"""The planner's benchmark: it times what it claims, and counts the rows that a run would move."""

import json

import numpy as np
import pytest

from skirl.cli import main
from skirl.core.placement import Placement
from skirl.data.synthetic import Synthetic
from skirl.measure.bench.oracle import Oracle
from tests.measure.bench.test_traffic import make_trace
from tests.oracle import brute

SMALL = {"batch": 16, "depth": 4, "cache": 450, "steps": 6}


@pytest.mark.parametrize("ids", ["rows", "hashed64"])
@pytest.mark.parametrize("threads", [1, 3])
def test_it_counts_what_the_rule_says(ids, threads):
    result = Oracle(**SMALL, ids=ids, threads=threads).run()
    trace = [
        [t << 48 | row for t in range(26) for row in batch.sparse.values()[t * 16 : (t + 1) * 16].tolist()]
        for batch in Synthetic("criteo-kaggle", batch_size=16, batches=10, seed=0)
    ]
    ends = [min(n + 4, 10) for n in range(10)]
    timed = brute.victims(trace, 450, ends)[1:7]
    assert result["rows_a_batch"]["evicted"] == sum(map(len, timed)) / 6 > 0
    assert result["ids_per_s"] > 0 and result["ms_per_batch"] == pytest.approx(result["enter_ms"] + result["plan_ms"])


def refetched(trace: list[list[int]], capacity: int, depth: int) -> int:
    """Return how many rows are brought in again if batch t knows the batches before t + depth."""
    ends = [min(n + depth, len(trace)) for n in range(len(trace))]
    left = sum(map(len, brute.victims(trace, capacity, ends)))
    resident, arrived = set[int](), 0
    for batch, leave in zip(trace, brute.victims(trace, capacity, ends), strict=True):
        resident -= set(leave)
        arrived += len(set(batch) - resident)
        resident |= set(batch)
    assert len(resident) == arrived - left
    return arrived - len({row for batch in trace for row in batch})


def test_owners_beside_one_planner(tmp_path, capsys):
    """Both fetch by the rule, checked on requests that are worked out by hand."""
    ids = np.random.default_rng(3).zipf(1.3, 1000) % 90
    np.save(tmp_path / "trace.npy", ids)
    flags = ["bench", "oracle", "--trainers", "4", "--trace", str(tmp_path / "trace.npy"), "--batch", "50"]
    assert main([*flags, "--cache", "60", "--depth", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = np.unique(ids, return_inverse=True)[1].reshape(-1, 50)
    owner = Placement.even(4).site_of(np.arange(rows.max() + 1))
    parts = [np.array_split(batch, [12, 25, 37]) for batch in rows]
    asked = [
        [[row for part in batch for row in brute.distinct(part.tolist()) if owner[row] == rank] for batch in parts]
        for rank in range(4)
    ]
    assert result["fetched"]["one"] == refetched(rows.tolist(), 60, 3)
    assert result["fetched"]["owners"] == sum(refetched(trace, 15, 3) for trace in asked) > 0
    assert result["fetches_vs_one"] == round(result["fetched"]["owners"] / result["fetched"]["one"], 4)
    requests = sum(map(len, (batch for trace in asked for batch in trace)))
    assert result["rows_a_trainer"] == requests / 20 / 4
    words = requests + 20 * 4 * 4 * (4 + 1)  # in each message: its kind, number, vote, and one table's count
    assert result["id_bytes_a_row"] == round(4 * words / requests, 3)
    assert result["cpu_vs_one"] > 0
    assert main([*flags, "--cache", "60", "--depth", "3"]) == 0
    assert "4 owners" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "capacity", "depth"), [("scarab_first_half.i64be.xz", 15_000, 50), ("orm_night.i32le.bz2", 4_323, 20)]
)
def test_eight_owners_fetch_about_what_one_planner_would(data_folder, tmp_path, name, capacity, depth):
    path = data_folder / "traces" / name
    if not path.is_file():
        pytest.skip(f"SKIRL_DATA has no traces/{name}")
    np.save(tmp_path / "trace.npy", make_trace().decode(path)[:400_000])
    result = Oracle(batch=4096, depth=depth, cache=capacity, trainers=8, trace=tmp_path / "trace.npy").run()
    assert result["fetches_vs_one"] <= 1.02
    assert result["id_bytes_a_row"] <= 5


def test_a_wrong_flag_is_named(tmp_path):
    with pytest.raises(ValueError, match="threads is 2: set it to 1, since trainers is 8"):
        Oracle(threads=2, trainers=8)
    with pytest.raises(ValueError, match="which is not a file"):
        Oracle(trainers=8, trace=tmp_path / "trace.npy")
    with pytest.raises(ValueError, match="set trainers to 2 or more"):
        Oracle(trace=tmp_path / "trace.npy")
    np.save(tmp_path / "trace.npy", np.arange(100))
    with pytest.raises(ValueError, match="depth is 200, the trace has 10 batches of 10: set either to less"):
        Oracle(trainers=8, batch=10, trace=tmp_path / "trace.npy").run()
    with pytest.raises(ValueError, match="threads is 0: set it to 1 or more"):
        Oracle(threads=0)
