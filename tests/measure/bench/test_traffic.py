"""The traffic benchmark: an executed run moves exactly what its plan says, and reaches MIN."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from skirl.cli import main
from skirl.engine.engine import Damaged
from skirl.measure.bench import traffic
from skirl.measure.bench.traffic import Traffic
from skirl.pipeline.simulate import Totals
from skirl.store import MemoryStore

MAKE_TRACE = Path(__file__).parents[3] / "benchmarks" / "make_trace.py"


def make_trace():
    spec = importlib.util.spec_from_file_location("make_trace", MAKE_TRACE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def trace(tmp_path):
    def save(ids) -> Path:
        path = tmp_path / "ids.npy"
        np.save(path, ids)
        return path

    return save


@pytest.fixture
def skewed():
    return make_trace().zipf(3_000, rows=900, exponent=0.9, seed=3)


def longest_reuse(ids: np.ndarray, batch: int) -> int:
    """Return the most batches between a use of an id and its next use."""
    last, longest = {}, 0
    for i, key in enumerate(ids[: len(ids) // batch * batch].tolist()):
        longest = max(longest, i // batch - last.get(key, i // batch))
        last[key] = i // batch
    return longest


def test_the_whole_trace_as_window_reaches_min(trace, skewed):
    result = Traffic(trace(skewed), batch=50, capacity=120).run()
    assert result["skirl"] == result["min"] > 0
    assert result["to_min"]["skirl"] == 1
    assert result["first_uses"] == result["distinct"] == len(np.unique(skewed))
    assert result["min"] < result["lru"] and result["min"] < result["lfu"] and result["min"] < result["ttl"]
    # Every row that came in has either left or is still in the cache, which is full.
    assert result["written"] == result["skirl"] + result["first_uses"] - 120


def test_a_window_as_long_as_the_longest_reuse_reaches_min_too(trace, skewed):
    depth = longest_reuse(skewed, 50) + 1  # the window includes the batch in the loop
    path = trace(skewed)
    assert Traffic(path, 50, 120, depth).run()["skirl"] == Traffic(path, 50, 120, "epoch").run()["min"]


def test_more_depth_is_less_traffic_here_and_never_more_than_lru(trace, skewed):
    path = trace(skewed)
    results = [Traffic(path, 50, 120, depth).run() for depth in (1, 3, 8)]
    counts = [result["skirl"] for result in results]
    assert results[0]["lru"] >= counts[0] > counts[1] > counts[2] > results[0]["min"]


def test_a_window_that_grows_knows_less_at_the_start(trace):
    # 40 batches of fresh ids in threes, one set of which returns after 30 batches: the first 8 batches do not show it.
    path = trace(np.concatenate([np.arange(30), np.arange(100, 400), np.arange(30)]))
    at_once = Traffic(path, batch=10, capacity=40, depth=50).run()
    grows = Traffic(path, batch=10, capacity=40, depth=50, ramp=True).run()
    assert at_once["skirl"] == at_once["min"] < grows["skirl"]


@pytest.mark.parametrize("policy", ["lru", "lfu", "ttl"])
def test_a_run_under_another_policy_counts_what_is_reported_of_it(trace, skewed, policy):
    result = Traffic(trace(skewed), batch=50, capacity=120, depth=8, policy=policy).run()
    assert result["skirl"] == result[policy]


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_prefetch_changes_no_count(trace, skewed, prefetch):
    path = trace(skewed)
    one, other = (Traffic(path, 50, 120, 6, prefetch=p).run() for p in (prefetch, 2))
    assert [one[k] for k in ("skirl", "min", "ttl", "written")] == [
        other[k] for k in ("skirl", "min", "ttl", "written")
    ]


def test_ids_may_be_sparse_and_of_any_integer_type(trace, skewed):
    expected = Traffic(trace(skewed), 50, 120, 6).run()
    scattered = np.random.default_rng(0).integers(-(1 << 62), 1 << 62, 900)
    for ids in (scattered[skewed], skewed.astype(np.uint64) + np.uint64(1 << 63), skewed.astype(np.int16)):
        result = Traffic(trace(ids), 50, 120, 6).run()
        assert [result[k] for k in ("skirl", "min", "lru", "lfu", "ttl", "distinct")] == [
            expected[k] for k in ("skirl", "min", "lru", "lfu", "ttl", "distinct")
        ]


def test_a_last_shorter_batch_is_dropped(trace):
    result = Traffic(trace(np.array([1, 2, 3, 4, 1, 2, 9])), batch=2, capacity=2).run()
    assert (result["batches"], result["distinct"], result["skirl"]) == (3, 4, 2)


def test_a_cache_larger_than_the_trace_brings_nothing_in_again(trace, skewed):
    result = Traffic(trace(skewed), batch=50, capacity=5_000).run()
    assert result["skirl"] == result["min"] == result["lru"] == result["written"] == 0
    assert result["to_min"]["lru"] is None


def test_a_run_that_differs_from_its_plan_is_not_reported(trace, skewed, monkeypatch):
    monkeypatch.setattr("skirl.pipeline.simulate.simulate", lambda *args, **kwargs: Totals())
    with pytest.raises(AssertionError, match="its plan says"):
        Traffic(trace(skewed), batch=50, capacity=120).run()


def test_without_the_independent_code_its_counts_are_missing(trace, skewed, monkeypatch, tmp_path):
    monkeypatch.setattr(traffic, "INDEPENDENT", tmp_path / "traffic_others.py")
    bench = Traffic(trace(skewed), batch=50, capacity=120)
    result = bench.run()
    assert result["min"] is None and result["lru"] is None
    assert result["to_min"] == dict.fromkeys(("skirl", "min", "lru", "lfu", "ttl"))
    assert "run skirl from a checkout" in result["missing"]
    assert result["skirl"] > 0 and result["lfu"] > 0
    shown = bench.summary(result)
    assert shown["min"] == "missing" and "of min" not in shown["skirl"] and shown["missing"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"batch": 0}, "batch is 0: set it to 1 or more"),
        ({"capacity": -3}, "capacity is -3: set it to 1 or more"),
        ({"depth": 0}, "depth is 0: set it to 1 or more"),
        ({"depth": "all"}, "set it to a number of batches"),
        ({"prefetch": -1}, "prefetch is -1: set it between"),
        ({"policy": "fifo"}, "policy is 'fifo': set it to min, lru, lfu or ttl"),
        ({"policy": "ttl"}, "set depth to a number of batches"),
        ({"trace": Path("ids.txt")}, "set it to a .npy file"),
        ({"trace": Path("nowhere.npy")}, "set it to one that exists"),
    ],
)
def test_bad_flags_are_refused_with_what_to_set(trace, flags, says):
    with pytest.raises(ValueError, match=says):
        Traffic(**{"trace": trace(np.arange(9)), "batch": 2, "capacity": 4} | flags)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (np.arange(2), "batch is 3, the trace has 2 accesses: set batch to 2 or less"),
        (np.zeros((2, 9), np.int64), "save one dimension"),
        (np.zeros(9), "save one dimension of integer ids"),
        (np.array([1, 1, 1, 4, 5, 6]), "batch 1 has 3 distinct ids: set capacity to 3 or more"),
    ],
)
def test_bad_traces_are_refused_with_what_to_do(trace, ids, says):
    with pytest.raises(ValueError, match=says):
        Traffic(trace(ids), batch=3, capacity=2).run()


def test_the_command_prints_one_json_line(trace, skewed, capsys):
    flags = ["bench", "traffic", "--trace", str(trace(skewed)), "--batch", "50", "--capacity", "120", "--depth", "6"]
    assert main([*flags, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert result["depth"] == 6 and result["bench"] == "traffic" and result["seconds"] > 0
    assert main(flags) == 0
    shown = capsys.readouterr().out
    assert f"{result['skirl']:,}" in shown and f"{result['ttl']:,}" in shown
    assert main([*flags[:6], "--capacity", "1"]) == 1
    assert "set --capacity to" in capsys.readouterr().err


# Counts by other people's single-purpose code: MIN, LRU.
KNOWN = [
    pytest.param("scarab_first_half.i64be.xz", 512, 7_872, 157_446, 70_061, 176_940, marks=pytest.mark.slow),
    pytest.param("scarab_first_half.i64be.xz", 512, 31_489, 157_446, 4_613, 74_387, marks=pytest.mark.slow),
    ("scarab_first_half.i64be.xz", 4096, 7_872, 157_446, 81_000, 169_707),
    ("scarab_first_half.i64be.xz", 4096, 31_489, 157_446, 5_364, 72_846),
    pytest.param("orm_night.i32le.bz2", 512, 4_323, 86_466, 253_034, 619_798, marks=pytest.mark.slow),
    pytest.param("orm_night.i32le.bz2", 512, 17_293, 86_466, 46_550, 133_523, marks=pytest.mark.slow),
    pytest.param("orm_night.i32le.bz2", 4096, 4_323, 86_466, 293_113, 536_211, marks=pytest.mark.slow),
    pytest.param("orm_night.i32le.bz2", 4096, 17_293, 86_466, 47_137, 132_916, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "batch", "capacity", "first_uses", "least", "lru"), KNOWN)
def test_real_traces(data_folder, tmp_path, name, batch, capacity, first_uses, least, lru):
    path = data_folder / "traces" / name
    if not path.is_file():
        pytest.skip(f"SKIRL_DATA has no traces/{name}")
    np.save(tmp_path / "trace.npy", make_trace().decode(path))
    result = Traffic(tmp_path / "trace.npy", batch, capacity, "epoch").run()
    assert (result["first_uses"], result["min"], result["lru"]) == (first_uses, least, lru)
    assert result["skirl"] == least


@pytest.mark.parametrize("which", [0, 0.5, 1])
@pytest.mark.parametrize("call", ["read", "write"])
def test_a_store_that_loses_one_call_is_noticed(trace, skewed, monkeypatch, call, which):
    """Counts come from the store, not the plan: nothing else would notice a write lost at the end."""
    path, real, calls = trace(skewed), getattr(MemoryStore, call), []

    def run(lost):
        calls.clear()

        def counted(self, keys, rows):
            calls.append(len(keys))
            if len(calls) - 1 != lost:
                return real(self, keys, rows)
            return np.zeros(len(keys), np.bool_) if call == "read" else 0

        monkeypatch.setattr(MemoryStore, call, counted)
        Traffic(path, batch=50, capacity=120).run()

    run(lost=None)
    moved = [number for number, count in enumerate(calls) if count]
    if call == "write":
        moved = moved[:-1]  # the last one is the flush when the embeddings are closed
    with pytest.raises((AssertionError, Damaged), match=r"its plan says|not in the store"):
        run(lost=moved[round(which * (len(moved) - 1))])
