"""Trainers on one machine: they find each other where nobody else can reach them, and end together."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from skirl import cli
from skirl.peers.launch import _why
from tests.warm import COMMAND, PIPE, Python

TRAINER = """
import os, sys, time
from skirl import cli
from skirl.peers.processes import die_with_launcher
from skirl.peers.job import join
folder, rank = sys.argv[1], os.environ["RANK"]

def write(*facts):
    with open(f"{folder}/.{rank}", "w") as file:
        file.write(" ".join(map(str, (os.getpid(), *facts))))
    os.rename(f"{folder}/.{rank}", f"{folder}/{rank}")

if sys.argv[2] == "wait":
    die_with_launcher()
    write()
    time.sleep(60)
import numpy as np
with join(timeout=120) as peers:
    come = peers.channel("votes").exchange([np.array([peers.rank], np.uint8)] * peers.size)
    files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    links = [os.readlink(path) for path in files if os.path.lexists(path)]
    mine = {name[8:-1] for name in links if name.startswith("socket:")}
    tables = [open(f"/proc/net/{name}").read().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table]
    addresses = {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in mine}
    write(*np.concatenate(come), *addresses)
    peers.channel("votes").exchange([np.array([peers.rank], np.uint8)] * peers.size)  # both have written
    if peers.rank == 1:
        os._exit(7)
    peers.channel("votes").exchange([np.array([peers.rank], np.uint8)] * peers.size)
"""
LOOPBACK = "0100007F"
"""127.0.0.1, as the kernel prints the addresses on which a process listens."""


@pytest.fixture
def launched(python: Python, tmp_path: Path):
    """Return `launched(how)`, which gives the process of a launch of two trainers; their files are in `tmp_path`."""
    (tmp_path / "trainer.py").write_text(TRAINER)

    def start(how: str):
        words = ["launch", "-n", "2", "--", str(tmp_path / "trainer.py"), str(tmp_path), how]
        return python.start(COMMAND, *words, stdout=PIPE, stderr=PIPE)

    return start


def up(folder: Path) -> list[list[str]]:
    until = time.monotonic() + 100
    while not all((folder / name).is_file() for name in "01"):
        assert time.monotonic() < until
        time.sleep(0.05)
    return [(folder / name).read_text().split() for name in "01"]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_trainers_meet_on_loopback_and_their_exit_code_is_passed_on(launched, tmp_path, monkeypatch):
    for name, number in (("RANK", "1"), ("WORLD_SIZE", "2")):  # as in a job that runs the launch
        monkeypatch.setenv(name, number)
    with launched("exit") as process:
        _, err = process.communicate(120)
    found = up(tmp_path)
    assert [facts[1:3] for facts in found] == [["0", "1"]] * 2
    assert {address for facts in found for address in facts[3:]} == {LOOPBACK}
    assert process.returncode == 7
    assert err.splitlines()[-1] == "skirl launch: rank 1 ended with exit code 7"  # it said nothing
    assert not any(alive(int(facts[0])) for facts in found)


LOST, TOLD = {"step": 7, "lost": True}, {"step": 7, "lost": False}


@pytest.mark.parametrize(
    ("codes", "notes", "said"),
    [
        ({0: 1, 1: -9}, {0: LOST}, (137, "rank 1 was killed by SIGKILL in step 7", True)),
        ({0: 1, 1: -15}, {0: LOST, 1: TOLD}, (1, "rank 1 ended with exit code 1 in step 7; it said why above", True)),
        ({0: 1, 1: 2}, {1: TOLD | {"step": None}}, (2, "rank 1 ended with exit code 2; it said why above", False)),
        ({0: -15, 1: 3, 2: 1}, {2: LOST}, (3, "rank 1 ended with exit code 3 in step 7", True)),
    ],
)
def test_the_launcher_names_the_trainer_that_has_the_reason(tmp_path, codes, notes, said):
    for rank, note in notes.items():
        (tmp_path / str(rank)).write_text(json.dumps(note))
    assert _why(codes, tmp_path) == said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_trainers_end_with_the_launcher(launched, tmp_path, number, code):
    with launched("wait") as process:
        pids = [int(facts[0]) for facts in up(tmp_path)]
        os.kill(process.pid, number)
        process.communicate(60)
        assert process.returncode == code
        until = time.monotonic() + 100
        while any(map(alive, pids)):
            assert time.monotonic() < until
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--", "trian"], "'trian' cannot be launched"),
        (["--", "launch", "--", "train"], "'launch' cannot be launched"),
        (["--", "gone.py"], "gone.py does not exist"),
        (["-n", "0", "--", "report"], "--trainers is 0: set it to 1 or more"),
        (["--", "train", "--stpes", "3"], "there is no flag --stpes: did you mean --steps?"),
        (["--", "train", "--data", "synthetic:tiny", "--steps", "0"], "steps is 0"),
    ],
)
def test_what_every_trainer_would_refuse_is_refused_at_once(capsys, args, said):
    assert cli.main(["launch", *args]) == 2
    assert said in capsys.readouterr().err
