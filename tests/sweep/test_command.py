"""`skirl sweep`: what it prints and leaves behind, beside lone runs; and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from skirl import cli
from skirl.sweep.command import SweepCommand
from skirl.sweep.flags import RaceFlags
from skirl.tools.progress import listed
from skirl.train.commands import Train

FLAGS: dict[str, Any] = {
    "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 16, "steps": 40, "cache": "20%", "valid": "10%",
    "threads": 1, "quiet": True, "log_every": 10,
}  # fmt: skip
VARY = ("lr=0.02,0.5", "model=dlrm-tiny,dcnv2-tiny", "dense-lr=0.001,1e30")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepCommand, dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("sweep") / "s"
    command = SweepCommand.of(**FLAGS, vary=VARY, rungs="25%,50%", keep=2, run=str(folder))
    return command, command.run(), folder


def test_a_survivor_has_the_losses_and_the_scores_of_its_lone_run(ran: tuple):
    _, result, folder = ran
    stayed = [name for name, of in result["by_variant"].items() if of["left"] is None]
    assert len(stayed) == 2
    own = json.loads((folder / stayed[0] / "config.json").read_text())["flags"]
    alone = Train.of(**(own | {"run": "none", "quiet": True})).run()
    found = json.loads((folder / stayed[0] / "result.json").read_text())
    for name in ("loss", "auc", "logloss", "test_auc", "test_logloss", "samples", "steps"):
        assert found[name] == alone[name]


def test_what_diverges_leaves_and_so_do_those_below_the_rung(ran: tuple):
    _, result, folder = ran
    assert result["failed"] is None
    lines = [json.loads(line) for line in (folder / "race.jsonl").read_text().splitlines()]
    left = {line["variant"]: line for line in lines if line["event"] == "left"}
    assert len(left) == 6
    for name, line in left.items():
        assert (line["kind"] == "diverged") == ("1e+30" in name)
        of = result["by_variant"][name]
        assert of["left"] == line["why"]
        assert of["steps"] == line["step"] - (line["kind"] == "diverged")
    assert result["variant_steps"] == sum(left[n]["step"] if n in left else 40 for n in result["by_variant"])
    assert result["plans"] == result["read_batches"] == 40
    standing = [line["step"] for line in lines if line["event"] == "standing"]
    assert standing == [10, 20, 30, 40]


def test_the_summary_names_the_winner_and_all_others(ran: tuple):
    command, result, _ = ran
    text = listed(command.summary(json.loads(json.dumps(result))))
    assert re.search(rf"winner +{re.escape(result['winner'])}, log loss 0\.\d+ on the samples held out", text)
    for name in result["by_variant"]:
        assert name in text
    assert "40 batches, planned in 40 steps, once for all variants" in text


def test_a_run_that_all_leave_fails_and_says_so(tmp_path: Path):
    flags = FLAGS | {"steps": 20, "valid": None}
    result = SweepCommand.of(**flags, vary=("dense-lr=1e30,1e31",), run=str(tmp_path / "s")).run()
    assert "all 2 variants have diverged" in result["failed"]
    assert result["winner"] is None
    assert json.loads((tmp_path / "s" / "result.json").read_text())["failed"] == result["failed"]


def wrong(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["sweep", "--data", "synthetic:tiny", "--model", "dlrm-tiny", *words]) != 0
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    return said


def test_wrong_flags_are_refused_in_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert "a sweep has no variant: set --vary, such as lr=0.01,0.02" in wrong(capsys)
    assert "batch cannot vary" in wrong(capsys, "--vary", "batch=1,2")
    assert "--alpha is 1.5" in wrong(capsys, "--vary", "lr=1,2", "--alpha", "1.5")
    assert "rungs is '5%,x'" in wrong(capsys, "--vary", "lr=1,2", "--rungs", "5%,x")
    assert "--keep is 0" in wrong(capsys, "--vary", "lr=1,2", "--keep", "0")
    (tmp_path / "sweep.json").write_text("{}")
    assert "which already holds a sweep" in wrong(capsys, "--vary", "lr=1,2", "--steps", "2", "--run", str(tmp_path))


def test_rungs_are_steps_or_shares():
    assert RaceFlags(rungs="5%, 10%,700").rules(1000).rungs == (50, 100, 700)
    assert RaceFlags(rungs="1,2").rules(None).rungs == (1, 2)
