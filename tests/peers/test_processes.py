"""Trainers on one machine: they find each other where nobody else can reach them, and end together."""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed

from skirl import cli
from skirl.peers import job, processes
from skirl.peers.base import PeerError
from skirl.peers.job import Launched, _meet, _own_gpu
from skirl.peers.processes import _run_fork, _why
from tests.loops import wait_for
from tests.warm import COMMAND, PIPE, Python

NAMES = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "2000"}


def answer_of_a_fork(ask: Callable[[], int]) -> int:
    if (pid := os.fork()) == 0:
        code = 99
        try:
            code = ask()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("ended", [False, True])
def test_a_trainer_whose_launcher_has_ended_before_it_looked_ends(monkeypatch, ended):
    def ask() -> int:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
        monkeypatch.setenv("SKIRL_LAUNCHER", "1" if ended else str(os.getppid()))
        processes.die_with_launcher()
        return 0

    assert answer_of_a_fork(ask) == (-signal.SIGKILL if ended else 0)


def test_commands_and_trainers_that_are_alone_end_with_their_launcher(monkeypatch, capsys):
    asked: list[str] = []
    monkeypatch.setattr(cli, "die_with_launcher", lambda: asked.append("cli"))
    monkeypatch.setattr(job, "die_with_launcher", lambda: asked.append("join"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert cli.main(["--version"]) == 0
    job.join()
    assert asked == ["cli", "join"]


def test_a_fork_of_a_process_that_was_alone_joins_the_trainers_of_its_own_launcher(monkeypatch):
    monkeypatch.setattr(job, "_joined", [])
    assert job.trainers().size == 1 == len(job._joined)
    monkeypatch.setattr(job, "join", lambda *args, **more: SimpleNamespace(size=2, timeout=1.0))
    assert job.trainers().size == 1  # this process has decided
    assert answer_of_a_fork(lambda: job.trainers().size) == 2


def test_a_fork_has_the_threads_that_the_environment_sets_and_shows_its_errors(monkeypatch, capfd, tmp_path):
    def ended(command: Callable[[list[str]], int]) -> Any:
        with pytest.raises(SystemExit) as left:
            _run_fork(command, [], 0)
        return left.value.code

    monkeypatch.setattr(processes, "AFTER", 0.0)
    for name, value in {"OMP_NUM_THREADS": "3", "SKIRL_NOTES": str(tmp_path), "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert torch.get_num_threads() != 3 == answer_of_a_fork(lambda: ended(lambda words: torch.get_num_threads()))
    assert answer_of_a_fork(lambda: ended(lambda words: [][1])) == 1 == int((tmp_path / "code-1").read_text())
    assert "IndexError" in capfd.readouterr().err


def test_a_fork_that_is_done_ends_once_its_launcher_is_told_to(monkeypatch):
    told, tell = os.pipe()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def ask() -> int:
        _run_fork(lambda words: 0, [], told)
        os.write(tell, b"x")
        return threading.Event().wait()

    assert answer_of_a_fork(ask) == 0
    os.close(told)
    os.close(tell)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RANK": None}, "WORLD_SIZE is 2 and RANK is '' in the environment: start trainers with `skirl launch`"),
        ({"RANK": "x"}, "WORLD_SIZE is 2 and RANK is 'x' in the environment"),
        ({"RANK": "2"}, "RANK is 2 and WORLD_SIZE 2 in the environment: ranks are 0 to 1"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is two and WORLD_SIZE is 'two' in the environment"),
    ],
)
def test_a_wrong_environment_is_refused(change, said):
    environment = {name: value for name, value in (NAMES | change).items() if value is not None}
    with pytest.raises(ValueError, match=said):
        Launched.of(environment)


def test_machines_are_told_apart():
    one = Launched.of(NAMES)
    assert one is not None and one.one_machine and one.address == "127.0.0.1"
    other = Launched.of(NAMES | {"WORLD_SIZE": "4"})
    assert other is not None and not other.one_machine


def test_each_trainer_of_a_machine_has_a_gpu():
    launched = Launched.of(NAMES)
    assert launched is not None
    assert [_own_gpu(launched, gpus) for gpus in (2, 3)] == [1, 1]
    with pytest.raises(ValueError, match="2 trainers on a machine with 1 GPUs: start one for each GPU"):
        _own_gpu(launched, 1)


def test_a_rank_that_never_comes_is_named():
    launched = Launched.of(NAMES)
    assert launched is not None
    with pytest.raises(PeerError, match=r"rank 1 waited \d+\.\d s for rank 0 in the start of the job: it hangs"):
        _meet(torch.distributed.HashStore(), launched, 0.2)


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
    wait_for(lambda: all((folder / name).is_file() for name in "01"))
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
        wait_for(lambda: not any(map(alive, pids)))
