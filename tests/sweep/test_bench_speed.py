"""The benchmark of sweeps: what it times, and how it computes ratios."""

import io
import json

import pytest

from skirl.sweep import bench_speed
from skirl.train.recipe import Recipe

RECIPE = {
    "data": "synthetic:tiny",
    "model": "dlrm-tiny",
    "dim": 4,
    "batch": 8,
    "steps": 1000,
    "cache": "400",
    "threads": 1,
}


def test_a_run_says_what_it_took(monkeypatch, capsys):
    for count, processes, says in ((0, 1, {}), (2, 1, {"form": "loop"}), (2, 2, {"form": "2 processes"})):
        flags = Recipe.of(**RECIPE).flat()
        job = json.dumps({"flags": flags, "steps": 2, "variants": count, "processes": processes})
        monkeypatch.setattr("sys.argv", ["-c", job])
        monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
        bench_speed.main()
        ready, found = capsys.readouterr().out.splitlines()
        found = json.loads(found)
        assert ready == "ready" and found.keys() == {"seconds", "cpu"} | says.keys() and found["cpu"] > 0
        assert processes == 1 or found["form"] == says["form"]


def test_ratios(monkeypatch):
    """8 variants take 2 s together; alone 1 s with one thread, 0.5 with two; two at a time 1.25 s."""

    def timed(runs, store, steps, variants, processes=1):
        if variants:
            assert processes == 3
            return [{"seconds": 2.0, "cpu": 3.0, "form": "lanes"}]
        seconds = 1.25 if len(runs) > 1 else 1.0 / runs[0]["threads"]
        return [{"seconds": seconds, "cpu": 0.75} for _ in runs]

    monkeypatch.setattr(bench_speed, "_timed", timed)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    cells = {"models": ["dlrm-tiny"], "batches": [8, 16], "stores": ["memory"]}
    found = bench_speed.speed(Recipe.of(**RECIPE), variants=[8, 4], **cells, steps=2, repeats=2, processes=3)
    of_8, of_4 = ([cell for cell in found["cells"] if cell["variants"] == count] for count in (8, 4))
    for cells, times in ((of_8, 1.0), (of_4, 0.5)):
        assert [cell["batch"] for cell in cells] == [8, 16] and cells[0]["lone"] == {"1": 1.0, "2": 0.5}
        ratios = [cells[0][name] for name in ("vs_lone", "vs_side_by_side", "cpu_vs_lone")]
        assert ratios == [2.0 * times, 2.5 * times, 2.0 * times]
    assert found["least"] == 1.0 and found["vs_lone"] == pytest.approx(2**0.5)
