"""`skirl sweep` killed while it starts, races and saves goes on from its newest whole checkpoint to the same end."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from skirl.sweep import checkpoint
from skirl.sweep.checkpoint import HEADER
from skirl.sweep.command import SweepCommand
from skirl.sweep.crews import Crews
from skirl.sweep.sweep import Sweep
from tests.killed import ended, forked
from tests.sweep.folders import kill, kill_before, left_behind, same

RUNG = 6


def command(folder: Path, kills: int, processes: int) -> SweepCommand:
    more = kills - 1  # the first one comes before all steps
    return SweepCommand.of(
        data="synthetic:tiny", model="dlrm-tiny", dim=4, batch=16, steps=RUNG + 16 * more, cache="300", depth=3, threads=1,
        quiet=True, log_every=2, vary=("lr=0.02,0.3", "dense-lr=0.001,0.01"), rungs=f"{RUNG},{RUNG + 10 * more}",
        run=str(folder / "run"), save=folder / "saved", save_every=2, resume=True, processes=processes,
        store=f"disk:{folder / 'rows'}",
    )  # fmt: skip


def step_of(folder: Path) -> int:
    """Return the step of the checkpoint that counts; -1 if there is none."""
    header = folder / "saved" / HEADER
    return json.loads(header.read_bytes())["step"] if header.is_file() else -1


def in_a_rung() -> None:
    """From here on: killed when a second variant is about to leave, or when all have left that are in other processes."""
    dropped, leave, main = [], Crews.leave, os.getpid()

    def second(self: Sweep, name: str, *_: object) -> bool:
        dropped.append(name)
        return len(dropped) > 1 and os.getpid() == main

    def killing(self: Crews, *args, **more) -> None:
        leave(self, *args, **more)
        kill()

    kill_before(Sweep, "drop", second)
    Crews.leave = killing  # type: ignore[method-assign]


def before_the_first_header() -> None:
    checkpoint.write_sealed = kill  # type: ignore[assignment]


def soon(folder: Path, seconds: float) -> None:
    """From here on: killed some seconds after the sweep has got further than it had."""
    wanted = step_of(folder) + 2

    def look() -> None:
        while step_of(folder) < wanted:
            time.sleep(0.001)
        time.sleep(seconds)
        kill()

    threading.Thread(target=look, daemon=True).start()


def check(folder: Path, kills: int, seed: int, processes: int) -> None:
    rng, threads = random.Random(seed), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in range(kills):
            wait = rng.uniform(0, 0.03)
            plans = {0: before_the_first_header, 1: in_a_rung}

            def child(begins: Callable[[], object], number: int = number, wait: float = wait, plans=plans) -> None:
                plans.get(number, lambda: soon(folder, wait))()
                begins()
                command(folder, kills, processes).run()

            assert ended(*forked(child)) == -signal.SIGKILL
            if number < 2:  # the rung is at 6; step 4 may be on its way to disk
                assert step_of(folder) in ((-1,), (2, 4))[number]
        found = left_behind(folder, command(folder, kills, processes).run())
        same(found, left_behind(folder / "whole", command(folder / "whole", kills, 1).run()))
        assert sorted(steps for *_, steps, _ in found["losses"].values())[:2] == [6, 6]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_as_it_begins_and_in_a_rung(processes: int, tmp_path: Path, campaign_seed: int):
    check(tmp_path, 2, campaign_seed, processes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processes", [1, 2])
def test_many_kills(processes: int, tmp_path: Path, campaign_seed: int):
    check(tmp_path, 40, campaign_seed, processes)
