"""A sweep on several ranks leaves behind what it leaves behind in one process, to the bit; and what ends it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from skirl import cli
from skirl.cli.sweep import SweepCommand
from skirl.sweep import checkpoint
from tests.sweep.folders import left_behind, same
from tests.warm import COMMAND, Python

FLAGS: dict[str, Any] = {
    "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 16, "steps": 24, "cache": "300", "valid": "10%",
    "quiet": True, "log_every": 4, "rungs": "25%,75%", "threads": 1, "processes": 1,
    "eval_every": 8,
}  # fmt: skip
PLAIN: dict[str, Any] = {"rungs": None, "valid": None, "eval_every": None}
VARY = ("lr=0.02,0.5", "dim=4,8")
DIVERGES = "dense-lr=0.001,1e30"


def flags_of(folder: Path, **more: Any) -> dict[str, Any]:
    where = {"run": str(folder / "run"), "save": folder / "saved", "store": f"disk:{folder / 'rows'}"}
    return FLAGS | {"vary": VARY, **where, **more}


def on_ranks(python: Python, size: int, folder: Path, fault: str = "", **more: Any) -> tuple[list[int], Any]:
    """Return the exit codes, and the result or what all said. `fault`: code that each rank runs first, as `RANK`."""
    words = ["--json"]
    for name, value in flags_of(folder, **more).items():
        flag = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, tuple) else (value,):
            words += [] if one in (None, False) else [flag] if one is True else [f"{flag}={one}"]
    in_turn = "from skirl.sweep.fused import Forms; Forms.only = 'loop'"
    code = f"import os, signal; RANK = int(os.environ['RANK'])\n{in_turn}\n{fault}\n{COMMAND}"
    team = python.team(size, code, "sweep", *words)
    said = [process.communicate(200) for process in team]
    assert [out for out, _ in said[1:]] == [""] * (size - 1)  # the first speaks for all
    return [process.wait() for process in team], json.loads(said[0][0]) if said[0][0] else [err for _, err in said]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one")
    return left_behind(folder, SweepCommand.of(**flags_of(folder)).run())


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_all_that_is_left_behind_is_that_of_one_process(
    size: int, whole: dict[str, Any], python: Python, tmp_path: Path
):
    codes, result = on_ranks(python, size, tmp_path, "Forms.only = None")
    assert codes == [0] * size and result["processes_used"] == size
    assert len(whole["rows"]) == 4 and min(rows.num_rows for rows in whole["rows"].values()) > 100
    same(left_behind(tmp_path, result), whole)
    assert len([*(tmp_path / "rows").iterdir()]) == size


SIGNALLED = """
from skirl.sweep import run
from skirl.sweep.sweep import Sweep
run.SECONDS = 1e9  # they meet where something is decided, however slow the machine is
step = Sweep.step
def signalled(self, batch):
    if RANK == {rank} and self.lookahead.step == {step}:
        os.kill(os.getpid(), signal.{name})
    return step(self, batch)
Sweep.step = signalled
"""


def test_ranks_meet_where_something_is_decided(python: Python, tmp_path: Path):
    """After the first step, at lines of metrics, rungs and the end; not at each step."""
    met = """
from skirl.sweep import run
from skirl.sweep.ranks import Ranks
run.SECONDS = 1e9
told, met = Ranks.told, []
def counted(self, own, what):
    if what == "losses":
        met.append(len(own[1]))
    if what == "facts":
        assert RANK or met == [1, 5, 6, 8, 4, 0], met
    return told(self, own, what)
Ranks.told = counted
"""
    codes, _ = on_ranks(python, 2, tmp_path, met, **PLAIN | {"log_every": 12, "rungs": "25%,20"})
    assert codes == [0, 0]


def test_it_goes_on_in_other_numbers_of_processes(whole: dict[str, Any], python: Python, tmp_path: Path):
    """Signals to one rank end all at the step where they meet next, here at a rung."""
    fault = SIGNALLED.format(rank=1, step=5, name="SIGINT")
    codes, stopped = on_ranks(python, 3, tmp_path, fault, save_every=4)
    assert codes == [130] * 3 and stopped["stopped_by"] == "Ctrl-C" and stopped["steps"] == 6
    fault = SIGNALLED.format(rank=1, step=17, name="SIGTERM")
    codes, stopped = on_ranks(python, 2, tmp_path, fault, save_every=4, resume=True)
    assert codes == [0, 0] and stopped["stopped_by"] == "SIGTERM" and stopped["steps"] == 18
    result = SweepCommand.of(**flags_of(tmp_path, save_every=4, resume=True)).run()
    same(left_behind(tmp_path, result), whole)


def test_variants_that_diverge_leave_and_a_rank_without_variants_frees_its_memory(python: Python, tmp_path: Path):
    freed = """
import gc, weakref
from skirl.sweep.ranks import Ranks
from skirl.sweep.run import SweepRun
begin, told, held = SweepRun.begin, Ranks.told, []
def watched(self):
    begin(self)
    held[:] = [self, *(weakref.ref(one.model) for one in self.sweep.variants)]
def checked(self, own, what):
    if what == "facts" and not held[0].here:
        gc.collect()
        assert not any(model() for model in held[1:]) and not held[0].sweep.engine.caches
    return told(self, own, what)
SweepRun.begin, Ranks.told = watched, checked
"""
    more = PLAIN | {"vary": (DIVERGES, "seed=0,1")}
    one = SweepCommand.of(**flags_of(tmp_path / "1", **more)).run()
    codes, result = on_ranks(python, 3, tmp_path / "3", freed, **more)
    assert codes == [0] * 3
    assert [of["left"] for of in result["by_variant"].values()].count(None) == 2
    same(left_behind(tmp_path / "3", result), left_behind(tmp_path / "1", one))


def test_a_rank_that_is_killed_ends_the_sweep_which_can_go_on(whole: dict[str, Any], python: Python, tmp_path: Path):
    codes, said = on_ranks(python, 2, tmp_path, SIGNALLED.format(rank=1, step=10, name="SIGKILL"), save_every=4)
    assert codes == [1, -9] and "rank 1" in said[0] and "gone" in said[0]
    codes, result = on_ranks(python, 2, tmp_path, save_every=4, resume=True)
    assert codes == [0, 0]
    same(left_behind(tmp_path, result), whole)


def test_a_cache_that_is_too_small_is_said_as_in_one(
    python: Python, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    more = PLAIN | {"vary": ("lr=0.1,0.5",), "steps": 4, "store": "memory"}
    words = "sweep synthetic:tiny --model dlrm-tiny --dim 4 --batch 16 --steps 4 --quiet --vary lr=0.1,0.5 --cache 2KiB"
    assert cli.main([*words.split(), "--processes", "1", "--run", "none"]) == 1
    one = capsys.readouterr().err
    codes, said = on_ranks(python, 2, tmp_path, cache="2KiB", **more)
    assert codes == [1, 1] and not (tmp_path / "saved" / checkpoint.HEADER).exists()
    assert any("in one of 2 processes, which share the cache: set --cache to " in err for err in said)
    told = next(err for err in said if "share the cache" in err)
    enough = [re.findall(r"'(\d+B)'", text)[-1] for text in (one, told)]
    assert int(enough[1][:-1]) in range(int(enough[0][:-1]), int(enough[0][:-1]) + 8)
    assert on_ranks(python, 2, tmp_path, cache=enough[1], **more)[0] == [0, 0]


FULL = """
import errno
from skirl.sweep.entrant import Entrant
from skirl.tools.os_errors import NotWritten
step = Entrant.step
def full(self, batch):
    step(self, batch)
    if "dim=8" in self.name and self.meter.steps == 8:
        raise NotWritten("the disk of the rows is full", errno.ENOSPC)
Entrant.step = full
"""


def test_an_error_in_a_step_ends_all(python: Python, tmp_path: Path):
    more = PLAIN | {"vary": ("dim=4,8",), "save_every": 4, "steps": 8}
    codes, said = on_ranks(python, 2, tmp_path, FULL, **more)
    assert codes == [1, 1] and all("the disk of the rows is full" in err for err in said)
    assert json.loads((tmp_path / "saved" / checkpoint.HEADER).read_text())["step"] == 4


def test_what_does_not_fit_into_memory_is_said_of_all_ranks(python: Python, tmp_path: Path):
    own = PLAIN | {"save": None, "store": "memory"}
    codes, said = on_ranks(python, 2, tmp_path, **own, memory="20KiB")
    least = re.search(r"--memory is 20.0 KiB: set --memory to (\d+B)", "".join(said))
    assert codes == [1, 1] and least, said
    assert on_ranks(python, 2, tmp_path, **own, memory=least[1])[0] == [0, 0]


def test_more_ranks_than_variants_are_refused(python: Python, tmp_path: Path):
    codes, said = on_ranks(python, 2, tmp_path, vary=("lr=0.1",), **PLAIN)
    assert codes == [1, 1]
    assert any("there are 2 processes, more than variants that race: launch -n 1, or fewer" in err for err in said)
