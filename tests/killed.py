"""Runs that are killed while they save, for tests/checkpoint: `python -m tests.killed FOLDER MOMENT...`.

Processes are forked from this one, which has imported and compiled everything and has no threads, so a run takes 0.1 s.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from skirl.checkpoint import numbers
from tests.resume import Run, Setup

ENDLESS = Setup(batches=None, passes=1, depth=5)  # type: ignore[arg-type]


def resumed(folder: Path) -> Run:
    run = Run(ENDLESS)
    return run.load(folder) if numbers(folder) else run


def imported() -> None:
    """Import what torch imports at an optimizer's first step, which would cost each fork 2 s."""
    weight = torch.ones(1, requires_grad=True)
    weight.sum().backward()
    torch.optim.Adam([weight]).step()


def forked(child: Callable[[Callable[[], object]], None]) -> tuple[int, int]:
    """Fork a process that trains. Once it has begun, return its id and a pipe that closes when it ends."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            child(lambda: os.write(writing, b"x"))
            os._exit(0)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
    os.close(writing)
    os.read(reading, 1)
    return pid, reading


def ended(pid: int, reading: int) -> int:
    os.close(reading)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def everywhere(folder: Path, moments: Iterable[int]) -> None:
    """Kill each save at one of its touches of a file, until one gets through; at moment 0, none is killed."""
    after = step_of(folder)
    for touches in moments:
        before = after

        def child(begins: Callable[[], object], left: int = touches, stop: int = before + 2) -> None:
            run = resumed(folder).train(until=stop)
            begins()
            if left:  # the first save is complete, so that all later ones can fall back on it
                kill_at_touch(folder, left)
            run.save(folder)

        status = ended(*forked(child))
        after = step_of(folder)
        print(touches, status, before, after, flush=True)
        if touches and status != -signal.SIGKILL:
            return


def kill_at_touch(folder: Path, left: int) -> None:
    """Kill this process the n-th time that it is about to open, name or remove a file in the folder."""

    def touched(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and str(folder) in str(args[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(touched)


def step_of(folder: Path) -> int:
    """Return the step of the newest checkpoint, which must be whole; 0 if there is none."""
    if not numbers(folder):
        return 0
    run = Run(ENDLESS)
    run.load(folder)
    return run.batches.step


def main() -> None:
    torch.set_num_threads(1)
    model = Run(ENDLESS).model
    for i in range(30):  # without a lookahead there are no threads: compile everything now
        model.loss(ENDLESS.data.batch(i)).backward()
    model.rows.flush()
    everywhere(Path(sys.argv[1]), map(int, sys.argv[2:]))


if __name__ == "__main__":
    main()
