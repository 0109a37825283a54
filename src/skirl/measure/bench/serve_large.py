"""Training on many times the caches' rows, held by memory nodes on disk, and the memory that every process takes."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from skirl.measure.bench.helpers import at_least_one, result
from skirl.tools.progress import size
from skirl.tools.units import parse_bytes

if TYPE_CHECKING:
    from skirl.store.remote.started import StartedNodes


@dataclass(frozen=True)
class ServeLarge:
    """Train over memory nodes on disk until many times the caches are touched, and watch the memory of all processes."""

    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "limits": ("trainer_memory", "node_memory", "patience"),
        "output": ("folder", "json"),
    }

    trainers: int = 2
    """The number of trainers."""
    nodes: int = 2
    """The number of memory nodes."""
    cache: str = "256MB"
    """The cache of each trainer."""
    times: float = 10.0
    """Minimum ratio of the bytes of touched rows to those of all caches."""
    dim: int = 256
    """Numbers in a row; with Adam's state, a record has three times as many."""
    batch: int = 4096
    """Samples in a step, over all trainers."""
    steps: int = 600
    """Steps in the run."""
    data: str = "synthetic:criteo-kaggle"
    """Where batches come from, as for `skirl train --data`."""
    trainer_memory: str = "2GB"
    """Maximum private memory of a trainer: its cache, rows in flight, the model and Python."""
    node_memory: str = "1GB"
    """Maximum private memory of a node's process. Python and torch take 190 MB; the rest is for calls in flight and
    what malloc keeps of earlier ones."""
    patience: float = 300.0
    """Seconds that a call may take and that trainers wait for each other."""
    folder: Path = Path("skirl-bench-large")
    """Where to keep the nodes' rows, in a new folder that is removed afterwards."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        at_least_one(self, "trainers", "nodes", "dim", "batch", "steps")
        for name in ("cache", "trainer_memory", "node_memory"):
            try:
                parse_bytes(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name} is {error}") from None
        if self.folder.exists():
            raise ValueError(f"folder is {str(self.folder)!r}, which exists: name one that does not")

    def run(self) -> dict[str, Any]:
        """Train and watch the memory of all processes."""
        from skirl.store.remote.started import StartedNodes

        self.folder.mkdir(parents=True)
        most: dict[str, int] = {}
        began = time.monotonic()
        try:
            rows = f"disk:{self.folder.absolute()}/{{}}"
            with StartedNodes(self.nodes, rows=rows, patience=self.patience, log=self.folder) as nodes:
                team = self._team(nodes.spec)
                try:
                    while any(trainer.poll() is None for trainer in team):
                        self._look(team, nodes, most)
                        time.sleep(0.25)
                finally:
                    for trainer in team:
                        trainer.kill()
                        trainer.wait()
                said = (self.folder / "trainer-0.out").read_text()
                on_disk = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
            if any(trainer.returncode for trainer in team):
                words = [(self.folder / f"trainer-{rank}.log").read_text()[-2000:] for rank in range(self.trainers)]
                raise RuntimeError(f"one of {self.trainers} trainers failed: {words}")
        finally:
            shutil.rmtree(self.folder)
        found = json.loads(said.splitlines()[-1])
        held = found["rows"]
        touched = held["touched"] * held["bytes_of_all"] // held["tables"]
        times = touched / (self.trainers * parse_bytes(self.cache))
        limits = {"trainer": parse_bytes(self.trainer_memory), "node": parse_bytes(self.node_memory)}
        over = [f"{name} took {size(took)}" for name, took in most.items() if took > limits[name.partition(" ")[0]]]
        few = [] if times >= self.times else [f"touched rows are {times:.1f} times the caches: raise steps"]
        return result(
            "serve-large", self, "trainers nodes cache dim batch steps data", touched=held["touched"],
            touched_bytes=touched, times_cache=round(times, 2), fetched=found["counters"]["fetched"], on_disk=on_disk,
            memory=most, limits=limits, seconds=round(time.monotonic() - began, 1), failed="; ".join([*over, *few]) or None,
        )  # fmt: skip

    def _team(self, spec: str) -> list[Any]:
        from skirl.store.remote.started import free_port

        words = {
            "data": self.data, "model": "dlrm-tiny", "dim": self.dim, "batch": self.batch, "steps": self.steps,
            "cache": self.cache, "optimizer": "adam", "shards": _shards(self.trainers), "threads": 1, "store": spec,
            "run": "none",
        }  # fmt: skip
        flags = [word for name, value in words.items() for word in (f"--{name}", str(value))]
        job = {"WORLD_SIZE": self.trainers, "LOCAL_WORLD_SIZE": self.trainers, "MASTER_ADDR": "127.0.0.1"}
        job |= {"MASTER_PORT": free_port(), "SKIRL_PATIENCE": f"{self.patience:g}", "OMP_NUM_THREADS": 1}
        team = []
        for rank in range(self.trainers):
            env = os.environ | {name: str(value) for name, value in (job | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            with (
                (self.folder / f"trainer-{rank}.out").open("w") as out,
                (self.folder / f"trainer-{rank}.log").open("w") as log,
            ):
                command = [sys.executable, "-m", "skirl", "train", *flags, "--json", "--quiet"]
                team.append(subprocess.Popen(command, env=env, stdout=out, stderr=log))
        return team

    def _look(self, team: Sequence[Any], nodes: "StartedNodes", most: dict[str, int]) -> None:
        """Update the most memory that each process has taken."""
        from skirl.store.remote.started import private_memory_of

        for rank, trainer in enumerate(team):
            name = f"trainer {rank}"
            most[name] = max(most.get(name, 0), private_memory_of(trainer.pid))
        for node in range(self.nodes):
            for number, pid in enumerate(nodes.family(node)):
                name = f"node {node}, process {number}"
                most[name] = max(most.get(name, 0), private_memory_of(pid))

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as text for a reader, by label."""
        lines = {
            "touched": f"{result['touched']:,} rows, {size(result['touched_bytes'])}: {result['times_cache']:.1f} times "
            f"{self.trainers} caches of {self.cache}; {result['fetched']:,} fetched again",
            "on disk": f"{size(result['on_disk'])} on {self.nodes} nodes",
        }
        lines |= {name: size(took) for name, took in result["memory"].items()}
        return lines | {"limits": ", ".join(f"{size(limit)} a {name}" for name, limit in result["limits"].items())}


def _shards(trainers: int) -> int:
    """Return the least power of two that is at least the number of trainers.

    >>> _shards(3)
    4
    """
    return 1 << (trainers - 1).bit_length()
