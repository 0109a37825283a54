"""The benchmark of sweeps: what it times, and how it computes ratios."""

import io
import json
from pathlib import Path

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
        monkeypatch.setattr("sys.stdin", io.StringIO("go\ngo\n"))
        bench_speed.main()
        ready, *turns = capsys.readouterr().out.splitlines()
        assert len(turns) == 2
        found = json.loads(turns[1])
        assert ready == "ready" and found.keys() == {"seconds", "cpu"} | says.keys() and found["cpu"] > 0
        assert processes == 1 or found["form"] == says["form"]


def test_ratios(monkeypatch):
    """8 variants take 2 s together; alone 1 s with one thread, 0.5 with two; two at a time 1.25 s. Each turn is slower."""

    class Turns(bench_speed._Turns):
        def __enter__(self) -> "Turns":
            self.form = "lanes"
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def take(self) -> None:
            [first, *others] = self._jobs
            seconds = 1.25 if others else 1.0 / first["flags"]["threads"]
            slower = 1 + len(self.seconds)
            assert first["processes"] == 3
            self.seconds.append(slower * (2.0 if first["variants"] else seconds))
            self.cpu.append(slower * (3.0 if first["variants"] else 0.75))

    monkeypatch.setattr(bench_speed, "_Turns", Turns)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    cells = {"models": ["dlrm-tiny"], "batches": [8, 16], "stores": ["memory"]}
    found = bench_speed.speed(Recipe.of(**RECIPE), variants=[8, 4], **cells, steps=2, repeats=3, processes=3)
    of_8, of_4 = ([cell for cell in found["cells"] if cell["variants"] == count] for count in (8, 4))
    for cells, times in ((of_8, 1.0), (of_4, 0.5)):
        assert [cell["batch"] for cell in cells] == [8, 16] and cells[0]["lone"] == {"1": 2.0, "2": 1.0}
        ratios = [cells[0][name] for name in ("vs_lone", "vs_side_by_side", "cpu_vs_lone")]
        assert ratios == [2.0 * times, 2.5 * times, 2.0 * times] and cells[0]["spread"] == 3.0
    assert found["least"] == 1.0 and found["vs_lone"] == pytest.approx(2**0.5)


def test_turns(monkeypatch):
    """A run trains turn by turn, in a process and on a disk of its own; one that cannot start says so."""
    flags = Recipe.of(**RECIPE).flat()
    with bench_speed._Turns([flags], "disk", 2) as runs:
        for _ in range(2):
            runs.take()
        folder = Path(runs._folder.name)
        assert [path.name for path in folder.iterdir()] == ["0"]
    assert len(runs.seconds) == len(runs.cpu) == 2 and min(runs.seconds) > 0
    assert not folder.exists() and all(one.returncode is not None for one in runs._started)
    monkeypatch.setattr(bench_speed, "_CODE", "raise SystemExit(3)")
    broken = bench_speed._Turns([flags, flags], "memory", 2)
    with pytest.raises(RuntimeError, match="a measuring process ended with exit code 3"):
        broken.__enter__()
    assert not Path(broken._folder.name).exists()
