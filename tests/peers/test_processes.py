"""Trainers find each other by what their launcher passes on, and end with it."""

import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed

from skirl import cli
from skirl.peers import job, processes
from skirl.peers.base import PeerError
from skirl.peers.job import Launched, _meet, _own_gpu

NAMES = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "2000"}


def answer_of_a_fork(ask: Callable[[], int]) -> int:
    if (pid := os.fork()) == 0:
        code = 99
        try:
            code = ask()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("pid", "program", "reaps"),
    [
        (1, "/usr/lib/systemd/systemd", True),
        (1, PermissionError(), True),
        (1, "/usr/bin/bash", True),
        (1, "/usr/bin/python3.11", False),
        (700, "/usr/lib/systemd/systemd", True),
        (700, "/usr/bin/python3.11", False),
        (700, PermissionError(), False),
    ],
)
def test_a_trainer_whose_launcher_has_ended_before_it_looked_ends(monkeypatch, pid, program, reaps):
    def readlink(path: str) -> str:
        assert path == f"/proc/{pid}/exe"
        if isinstance(program, OSError):
            raise program
        return program

    killed: list[Any] = []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setattr(processes, "os", SimpleNamespace(
        environ=os.environ, readlink=readlink, getppid=lambda: pid, getpid=os.getpid,
        kill=lambda *given: killed.append(given),
    ))  # fmt: skip
    monkeypatch.setattr(processes, "die_with_parent", lambda parent: None)
    processes.die_with_launcher()
    assert killed == [(os.getpid(), signal.SIGKILL)] * reaps


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
    with pytest.raises(ValueError, match=r"torch .* sees no GPU: .* set device to 'cpu'"):
        _own_gpu(launched, 0)


def test_a_rank_that_never_comes_is_named():
    launched = Launched.of(NAMES)
    assert launched is not None
    with pytest.raises(PeerError, match=r"rank 1 waited \d+\.\d s for rank 0 in the start of the job: it hangs"):
        _meet(torch.distributed.HashStore(), launched, 0.2)
