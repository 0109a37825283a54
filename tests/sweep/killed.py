"""`skirl sweep` killed while it trains, races and saves: `python -m tests.sweep.killed FOLDER KILLS SEED PROCESSES`.

The first run is killed when all variants are saved for the first time and their sweep is not; the second in the midst of a
rung, when one variant of those below it has left; the others at random. Each goes on from the newest whole checkpoint; the
last one is left to finish. Two lines of JSON say what it came to, and what a sweep came to that was never killed, in one
process.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from skirl.sweep import checkpoint
from skirl.sweep.checkpoint import HEADER
from skirl.sweep.command import SweepCommand
from skirl.sweep.crews import Crews
from skirl.sweep.sweep import Sweep
from tests.killed import ended, forked

RUNG = 6


def command(folder: Path, kills: int, processes: int) -> SweepCommand:
    more = kills - 1  # the first one comes before all steps
    return SweepCommand.of(
        data="synthetic:tiny", model="dlrm-tiny", dim=4, batch=16, steps=RUNG + 16 * more, cache="300", depth=3, threads=1,
        quiet=True, log_every=2, vary=("lr=0.02,0.3", "dense-lr=0.001,0.01"), rungs=f"{RUNG},{RUNG + 10 * more}",
        run=str(folder / "run"), save=folder / "saves", save_every=2, resume=True, processes=processes,
        store=f"disk:{folder / 'rows'}",
    )  # fmt: skip


def step_of(folder: Path) -> int:
    """Return the step of the checkpoint that counts; -1 if there is none."""
    header = folder / "saves" / HEADER
    return json.loads(header.read_bytes())["step"] if header.is_file() else -1


def left_behind(folder: Path) -> dict[str, Any]:
    """Return the results of a sweep: who left when, where all stood, and the losses of every variant."""
    result = json.loads((folder / "run" / "result.json").read_text())
    lines = [json.loads(line) for line in (folder / "run" / "race.jsonl").read_text().splitlines()]
    own = {name: json.loads((folder / "run" / name / "result.json").read_text()) for name in result["by_variant"]}
    return {
        "winner": result["winner"], "standing": result["standing"], "spent": result["variant_steps"],
        "race": [{k: v for k, v in line.items() if k not in ("seconds", "begun_at")} for line in lines],
        "losses": {name: of["loss"] for name, of in own.items()}, "steps": {n: of["steps"] for n, of in own.items()},
        "auc": {name: of["auc"] for name, of in own.items()},
    }  # fmt: skip


def in_a_rung(begins: Callable[[], object]) -> None:
    """From here on: killed when a second variant is about to leave, or when all have left that are in other processes."""
    drop, dropped, leave, main = Sweep.drop, [], Crews.leave, os.getpid()

    def killing(self: Sweep, name: str, why: str = "dropped") -> None:
        if dropped and os.getpid() == main:
            begins()
            os.kill(os.getpid(), signal.SIGKILL)
        dropped.append(name)
        drop(self, name, why)

    def killing_of(self: Crews, *args: Any, **more: Any) -> Any:
        leave(self, *args, **more)
        begins()
        os.kill(os.getpid(), signal.SIGKILL)

    Sweep.drop = killing  # type: ignore[method-assign]
    Crews.leave = killing_of  # type: ignore[method-assign]


def before_the_first_header(begins: Callable[[], object]) -> None:
    """Kill this process when a sweep's checkpoint is about to count."""

    def killing(*_: object) -> None:
        begins()
        os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.write_sealed = killing  # type: ignore[assignment]


CHOSEN = (before_the_first_header, in_a_rung)
"""Moments at which the first runs are killed."""


def main() -> None:
    torch.set_num_threads(1)
    folder, kills, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    processes = int(sys.argv[4])
    for kill in range(kills):

        def child(begins: Callable[[], object], kill: int = kill) -> None:
            wanted = step_of(folder) + 2  # each process gets further than the one before

            def look() -> None:
                while step_of(folder) < wanted:
                    time.sleep(0.001)
                begins()

            if kill < len(CHOSEN):
                CHOSEN[kill](begins)
            else:
                threading.Thread(target=look, daemon=True).start()
            command(folder, kills, processes).run()

        pid, reading = forked(child)
        if kill >= len(CHOSEN):
            time.sleep(rng.uniform(0, 0.03))
            os.kill(pid, signal.SIGKILL)
        assert ended(pid, reading) == -signal.SIGKILL
        print(f"killed after step {step_of(folder)}", flush=True)
    for told, of, count in (("resumed", folder, processes), ("whole", folder / "whole", 1)):
        assert ended(*forked(lambda begins, of=of, count=count: command(of, kills, count).run())) == 0
        print(told, json.dumps(left_behind(of)), flush=True)


if __name__ == "__main__":
    main()
