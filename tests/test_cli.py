"""The command line as a user sees it: what it prints where, its exit codes, and flags from a file."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from skirl import cli
from skirl.cli.command_line import read_config
from skirl.cli.plan import Size
from skirl.cli.sweep import SweepCommand
from skirl.cli.train import Train, Verify
from skirl.engine.engine import Damaged
from skirl.tools.flags import Composed, Flag, flags_of, option
from tests.processes import interpreter
from tests.warm import COMMAND, PIPE, Python

SMALL = "--data synthetic:tiny --model dlrm-tiny --dim 4 --batch 64 --steps 40 --threads 1".split()  # noqa: SIM905


def exit_code(*args: str) -> int:
    return cli.main(args)


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_flags_that_a_run_left_are_taken_or_passed_over_and_those_of_a_sweep_are_its_own(name, tmp_path):
    left = {command: tmp_path / f"{command}.json" for command in ("train", "sweep")}
    left["train"].write_text(json.dumps({"command": "train", "flags": Train.of(dim=8, lr=0.5).flat()}))
    left["sweep"].write_text(json.dumps({"command": "sweep", "flags": SweepCommand.of(vary=("lr=1,2",)).flat()}))
    if not issubclass(cli._command(name), Composed):
        with pytest.raises(ValueError, match="there is no flag --config"):
            cli._parse(name, ["--config", str(left["train"])])
        return
    flags = flags_of(cli._command(name))
    found = read_config(left["train"], name, flags, flags_of(Train))
    assert found["dim"] == 8 and found.keys() <= flags.keys() and ("lr" in found) == ("lr" in flags)
    assert not found.keys() & {"save", "run", "json"}
    if name == "sweep":
        assert read_config(left["sweep"], name, flags, flags_of(Train))["vary"] == ("lr=1,2",)
        return
    with pytest.raises(ValueError, match=f"{left['sweep']} is of a sweep: use `skirl sweep --config"):
        read_config(left["sweep"], name, flags, flags_of(Train))


@pytest.mark.parametrize("name", ["train", "verify", "size"])
def test_every_flag_is_explained(capsys, name):
    assert exit_code(name, "--help", "all") == 0
    shown = one_line(capsys.readouterr().out)
    owner = {"train": Train, "verify": Verify, "size": Size}[name]
    for flag in flags_of(owner).values():
        assert f"{option(flag.name)} " in shown and flag.help in shown
    assert ">>>" not in shown


def test_help_and_a_wrong_flag_need_no_torch():
    program = """if True:
        import sys
        from skirl import cli
        assert cli.main(["--help"]) == 0 and "skirl.train" not in sys.modules
        asked = [(f"{name} {flag}", code) for name in cli.COMMANDS for flag, code in (("--help", 0), ("--wrong", 2))]
        for args, code in [*asked, ("train --resume", 2), ("report none", 1)]:
            assert cli.main(args.split()) == code, args
            assert not {"torch", "numba", "pyarrow"} & set(sys.modules), args
        print(len(asked))
    """
    done = interpreter(program)
    assert done.stdout.endswith(f"\n{2 * len(cli.COMMANDS)}\n"), done.stderr
    assert all(f"\n  {name} " in done.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("evaluate --wrong", "there is no flag --wrong: skirl evaluate --help lists them"),
        (f"train {' '.join(SMALL)} --cache touched:2%", "--cache 76 is 76 rows, batch 0 needs 219"),
    ],
)
def test_an_error_names_what_was_written(capsys, args, said):
    """A flag that is missing is told only once all others are known."""
    assert exit_code(*args.split(), *(["--quiet"] if "--cache" in args else [])) in (1, 2)
    assert said in one_line(capsys.readouterr().err)


def test_a_run_prints_plain_lines_and_a_summary(python: Python):
    done = python.run(COMMAND, "train", *SMALL, "--cache", "touched:20%")
    assert done.returncode == 0 and not done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("count rows 1/40 · touched ")
    last = next(line for line in lines if line.startswith("train 40/40 · "))
    for fact in ("samples/s ", "loss ", "AUC ", "NE ", "refetched ", "new ", "written ", "cache 100% full", "hidden "):
        assert fact in last
    for label in ("run", "steps", "speed", "loss", "metrics", "cache", "rows", "hidden", "memory"):
        assert any(line.startswith(f"  {label} ") for line in lines)
    assert "\x1b" not in done.stdout


def test_flags_of_a_model_reach_it_and_are_told(capsys):
    flags = [*SMALL[:2], "--model", "dcnv2-tiny", *SMALL[4:], "--cache", "500", "--steps", "2", "--quiet", "--json"]
    told = ["--rank", "full", "--structure", "stacked", "--deep", "9,5"]
    assert exit_code("train", *flags, *told) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["rank"], result["structure"], result["deep"]) == ("full", "stacked", [9, 5])
    assert exit_code("verify", *flags, *told, "--batch", "8", "--cache", "auto", "--steps", "8") == 0


def test_json_is_one_line_alone_on_stdout(python: Python):
    done = python.run(COMMAND, "train", *SMALL, "--cache", "touched:20%", "--json")
    assert done.returncode == 0 and "train 40/40" in done.stderr
    (line,) = done.stdout.splitlines()
    report = json.loads(line, parse_constant=pytest.fail)  # NaN is not JSON
    assert report["command"] == "train" and report["steps"] == 40 and report["samples"] == 40 * 64
    assert report["counters"]["steps"] == 40 and report["seed"] == 0 and report["machine"]["threads"] == 1
    assert report["failed"] is None


def test_ctrl_c_is_exit_code_130(python: Python):
    endless = [*SMALL, "--steps", "1000000", "--cache", "2000"]
    with python.start(COMMAND, "train", *endless, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        while "train 1/" not in process.stdout.readline():
            assert process.poll() is None
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        said = process.stderr.read()
    assert process.returncode == 130
    assert re.fullmatch(
        r"skirl train: stopped by Ctrl-C at step [\d,]+, and nothing is saved, since --save is not set\n", said
    )


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_ctrl_c_saves_and_ends_with_one_line(python: Python, tmp_path, command):
    endless = [*SMALL, "--steps", "1000000", "--cache", "2000", "--save", str(tmp_path / "my save")]
    endless += ["--vary", "lr=0.1,0.2"] if command == "sweep" else []
    with python.start(COMMAND, command, *endless, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdout is not None
        while f"{command} 1/" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        *shown, last = process.stdout.read().splitlines()
    assert process.returncode == 130 and not any(line.startswith("  ") for line in shown)
    said = rf"stopped by Ctrl-C after step [\d,]+, saved in {tmp_path / 'my save'}; --resume goes on"
    assert re.fullmatch(said, last)


def test_a_reader_that_goes_away_is_no_traceback(python: Python):
    endless = [*SMALL, "--steps", "1000000", "--cache", "2000"]
    with python.start(COMMAND, "train", *endless, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == cli.NOBODY_READS == 141


def test_nobody_reading_is_no_traceback():
    """In a fresh interpreter, as torchrun starts it; others here are forked."""
    ours, theirs = os.pipe()
    os.close(ours)
    words = [sys.executable, "-m", "skirl", "train", "--help"]
    done = subprocess.run(words, stdout=theirs, stderr=PIPE, text=True, timeout=120)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, "")


@dataclass
class Command:
    number: int = 3
    json: bool = False

    def run(self) -> Mapping[str, object]:
        if self.number < 0:
            raise [ValueError("say more"), KeyError("a bug"), Damaged("rows were lost")][-1 - self.number]
        return {"number": self.number, "failed": "it is 13" if self.number == 13 else None}

    def summary(self, result: Mapping[str, object]) -> dict[str, str]:
        return {"number": str(result["number"]), "is": "a\nb"}


@pytest.fixture
def command_of_ours(monkeypatch):
    monkeypatch.setitem(sys.modules, "ours", SimpleNamespace(Command=Command))
    monkeypatch.setitem(cli.COMMANDS, "traffic", ("ours:Command", "count"))


@pytest.mark.usefixtures("command_of_ours")
def test_a_nested_command_prints_its_summary_and_fails_by_its_result(capsys):
    assert exit_code("traffic", "--number", "7") == 0
    assert capsys.readouterr().out == "  number  7\n  is      a\n          b\n"
    assert exit_code("traffic", "--json") == 0
    shown = {"command": "traffic", "number": 3, "json": True, "failed": None}
    assert json.loads(capsys.readouterr().out) == shown
    assert exit_code("traffic", "--number", "13") == 1
    assert capsys.readouterr().err == "skirl traffic: it is 13\n"


@pytest.mark.usefixtures("command_of_ours")
def test_errors_that_are_sentences_have_no_traceback_and_others_do(capsys, monkeypatch):
    assert exit_code("traffic", "--number", "-1") == 1
    assert capsys.readouterr().err == "skirl traffic: say more\n"
    assert exit_code("traffic", "--number", "-3") == 1
    assert capsys.readouterr().err == "skirl traffic: rows were lost\n"
    with pytest.raises(KeyError):
        exit_code("traffic", "--number", "-2")
    monkeypatch.setenv("SKIRL_TRACEBACK", "1")
    with pytest.raises(ValueError):
        exit_code("traffic", "--number", "-1")


@dataclass
class Flags:
    batch: int = 1
    rate: float | None = None
    depth: int | Literal["auto", "epoch"] = "auto"
    layers: tuple[int, ...] = ()
    out: Path | None = None
    quiet: bool = False
    name_of_run: str = ""


FLAGS = flags_of(Flags)
TRAIN = {name: Flag(name, str, "", "", group) for name, group in (("lr", ""), ("from_", "save"), ("out", "save"))}


def read(path: Path, text: str) -> dict[str, object]:
    path.write_text(text)
    return read_config(path, "train", FLAGS, TRAIN)


def test_toml_and_json_give_the_same_flags(tmp_path):
    toml = (
        'batch = 8\nrate = 1\ndepth = "epoch"\nlayers = [4, 2]\nout = "x"\nquiet = true\nname-of-run = "a"\nlr = 3.0\n'
    )
    flags = {"batch": 8, "rate": 1, "depth": "epoch", "layers": [4, 2], "out": "x", "quiet": True}
    flags |= {"name_of_run": "a", "lr": 3.0}
    expected = {"batch": 8, "rate": 1.0, "depth": "epoch", "layers": (4, 2), "out": Path("x"), "quiet": True}
    expected["name_of_run"] = "a"
    assert read(tmp_path / "a.toml", toml) == read(tmp_path / "a.json", json.dumps(flags)) == expected


def test_of_a_run_folder_it_takes_what_does_not_belong_to_that_run_alone(tmp_path):
    of_run = json.dumps({"command": "train", "flags": {"batch": 8, "rate": None, "out": "x"}, "begun_at": 0})
    assert read(tmp_path / "config.json", of_run) == {"batch": 8, "rate": None}
    assert read_config(tmp_path, "train", FLAGS, TRAIN) == {"batch": 8, "rate": None}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("batch = 8.0", "batch is 8.0: set it to a whole number"),
        ("batch = true", "batch is true: set it to a whole number"),
        ('rate = "fast"', 'rate is "fast": set it to a number'),
        ('depth = "all"', 'depth is "all": set it to a whole number, "auto" or "epoch"'),
        ("layers = [4, 2.5]", "layers is [4, 2.5]: set it to a list, each a whole number"),
        ("out = 3", "out is 3: set it to a path"),
        ("quiet = 1", "quiet is 1: set it to true or false"),
        ("name-of-run = 1000", "name-of-run is 1000: set it to text"),
        ("name-of-run = 2024-01-01", 'name-of-run is "2024-01-01": set it to text'),
        ("[batch]\ndim = 8", 'batch is {"dim": 8}: set it to a whole number'),
        ("batch 8", "this is not valid TOML (Expected '=' after a key"),
    ],
)
def test_anything_else_is_refused_by_file_and_key(tmp_path, line, said):
    with pytest.raises(ValueError) as error:
        read(tmp_path / "run.toml", line)
    assert str(error.value).startswith(f"{tmp_path / 'run.toml'}: {said}")
    assert "\n" not in str(error.value)
