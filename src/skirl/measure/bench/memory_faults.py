"""Memory nodes are killed, stopped, cut off and emptied under trainers; each run has to end with the same bits."""

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from skirl.measure.bench.faults import SEEDS, Fault, Faults, InAFork, Run
from skirl.measure.bench.helpers import at_least_one, made_folder
from skirl.measure.bench.nodes import ENVIRONMENT, BenchNode, send
from skirl.tools.machine import machine

if TYPE_CHECKING:
    from skirl.store.remote.started import StartedNodes

FAULTS = (
    Fault("kill", "node", "training"),
    Fault("stop", "node", "training"),
    Fault("lose", "node", "training"),
    Fault("cut", "node", "training"),
    Fault("kill", "node", "saving"),
    Fault("lose", "node", "saving"),
    Fault("stop", "node", "saving"),
    Fault("kill", "node", "restarting"),
    Fault("cut", "node", "saving"),
    Fault("lose", "node", "restarting"),
)
"""The runs take these in turn. stop: pause for less than patience, so the run goes on; cut: for longer; lose: kill the node
and delete its rows."""


@dataclass(frozen=True)
class NodeFaults:
    """Runs over several memory nodes on this machine, each hit at a random moment; one and two trainers take turns."""

    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "training": ("steps", "batch", "every"),
        "limits": ("patience", "limit"),
        "output": ("folder", "json"),
    }

    runs: int = 10
    """The number of runs; the kinds of faults take turns."""
    first: int = 0
    """The number of the first run, to repeat some of them."""
    nodes: int = 2
    """Memory nodes in a run."""
    seed: int = 0
    """Seed of the moments of faults and of the nodes that they hit."""
    steps: int = 40
    """Steps in a run."""
    batch: int = 64
    """Samples in a step."""
    every: int = 6
    """Steps between two checkpoints; up to this many may be lost."""
    patience: float = 8.0
    """Seconds that a call to a node may take and that trainers wait for each other."""
    limit: float = 300.0
    """Seconds after which a run counts as hung."""
    folder: Path | None = None
    """Where to keep the folder of each run until it ends; the system's temporary folder if not given. The folder of a
    run that fails stays."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        at_least_one(self, "runs", "nodes", "steps", "batch", "every")

    def run(self) -> dict[str, Any]:
        """Do all runs in sequence and return what came of them."""
        top = Path(tempfile.mkdtemp(dir=made_folder(self.folder), prefix="skirl-node-faults-"))
        os.environ |= ENVIRONMENT | {"SKIRL_PATIENCE": f"{self.patience:g}", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        trainers = Faults(
            steps=self.steps, batch=self.batch, every=self.every, patience=self.patience, limit=self.limit
        )
        import skirl.store.remote.started  # noqa: F401 - what is forked has it

        trainers._warm(top / "warm")
        undisturbed = InAFork(lambda: trainers._undisturbed(top / "undisturbed", {}), top / "undisturbed.json").answer()
        done = []
        for number in range(self.first, self.first + self.runs):
            done.append(self._one(trainers, number, top / f"run-{number}", undisturbed))
            if not self.json:
                print(_line(done[-1]), flush=True)
        wrong = [run for run in done if run["wrong"]]
        if not wrong:
            shutil.rmtree(top)
        recovered = sorted(run["recovery_s"] for run in done if run["recovery_s"] is not None)
        return {
            "bench": "node-faults", **asdict(self), "folder": str(self.folder) if self.folder else None,
            "faults": sum(run["hit"] for run in done),
            "same_bits": len(done) - len(wrong),
            "went_on": sum(run["recovery_s"] is None for run in done),
            "recovery_s": {"median": recovered[len(recovered) // 2], "worst": recovered[-1]} if recovered else None,
            "lost_steps": max((run["lost_steps"] for run in done), default=0),
            "of_each": done,
            "machine": machine(),
            "failed": f"{len(wrong)} of {len(done)} runs: {wrong[0]['wrong']}; see {top}" if wrong else None,
        }  # fmt: skip

    def _one(self, trainers: Faults, number: int, folder: Path, undisturbed: dict[str, str]) -> dict[str, Any]:
        """Do one run and return what came of it."""
        from skirl.measure.bench.serve_node import ForkedNode
        from skirl.store.remote.started import StartedNodes

        fault, rng = FAULTS[number % len(FAULTS)], random.Random(self.seed * SEEDS + number)
        size, rows = 1 + (number + number // len(FAULTS)) % 2, rng.choice(["memory", "disk"])
        folder.mkdir()
        kept = folder / "nodes"
        kept.mkdir()
        where = "memory" if rows == "memory" else f"disk:{kept}/{{}}"
        began, wrong = time.monotonic(), None
        with StartedNodes(
            self.nodes, rows=where, patience=self.patience, log=folder, start=ForkedNode.start, watched=False
        ) as nodes:
            run = OverNodes(trainers, fault, rng, folder, trainers._flags(folder), nodes, size)
            try:
                run.suffer()
            except TimeoutError as error:
                wrong = str(error)
            finally:
                for node in run.nodes:
                    node.end()
        wrong = wrong or trainers._judged(run, folder, undisturbed)
        if wrong is None:
            shutil.rmtree(folder)
        return {
            "number": number, "fault": list(fault), "trainers": size, "rows": rows, "hit": run.hit, "at_step": run.at_step,
            "recovery_s": run.recovery, "lost_steps": run.lost_steps, "seconds": round(time.monotonic() - began, 2),
            "wrong": wrong and f"run {number} ({' '.join(fault)}): {wrong}",
        }  # fmt: skip

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as text for a reader, by label."""
        took = result["recovery_s"] or {"median": None, "worst": None}
        return {
            "faults": f"{result['faults']} in {self.runs} runs over {self.nodes} memory nodes",
            "same bits": f"{result['same_bits']} of {self.runs} runs: all losses, rows and dense weights",
            "went on": f"{result['went_on']} runs, which no trainer had to start over",
            "recovery": f"{took['median']} s from a fault to the first new step, {took['worst']} s at worst",
            "lost steps": f"{result['lost_steps']} at most; saved every {self.every}",
        }


class OverNodes(Run):
    """A run of some trainers whose rows are on memory nodes; the faults hit the memory nodes.

    **Arguments**

    - `bench`, `fault`, `rng`, `folder`, `flags`: as for any `Run`.
    - `memory`: the memory nodes.
    - `trainers`: the number of trainers, each under its own launcher.
    """

    def __init__(
        self,
        bench: Faults,
        fault: Fault,
        rng: random.Random,
        folder: Path,
        flags: dict[str, Any],
        memory: "StartedNodes",
        trainers: int,
    ) -> None:
        self._memory, self._trainers = memory, trainers
        self._paused: list[int] = []
        self._until_then = 0.0
        super().__init__(bench, fault, rng, folder, flags)

    def _add(self) -> None:
        if (number := len(self.nodes)) < self._trainers:
            more = {"store": self._memory.spec, "resume": True, "peer_patience": self._bench.patience}
            more |= {"prefetch": 0, "link": "10Gbit,50ms"}
            self.nodes.append(BenchNode(self._flags | more, self._port, self._folder / f"trainer-{number}.log", True))

    def _hit(self, fault: Fault) -> float:
        """Inflict the fault on a random memory node and return the time."""
        self.hit, self.at_step = self.hit + 1, self.step
        self._stopped: list[int] = []
        node, memory = self._rng.randrange(self._memory.count), self._memory
        if fault.what in ("stop", "cut"):
            pids = memory.send(node, signal.SIGSTOP)
            if fault.what == "cut":
                self._stopped = list(pids)  # resumed after more than patience
            else:
                self._paused, self._until_then = (
                    pids,
                    time.monotonic() + self._bench.patience * self._rng.uniform(0.1, 0.5),
                )
            return time.monotonic()
        memory.send(node, signal.SIGKILL)
        memory.processes[node].wait()
        if fault.what == "lose":
            shutil.rmtree(self._folder / "nodes" / str(node), ignore_errors=True)
        return time.monotonic()

    def _tick(self) -> None:
        if self._paused and time.monotonic() > self._until_then:
            for pid in self._paused:
                send(pid, signal.SIGCONT)
            self._paused = []
        self._memory.tick()
        super()._tick()


def _line(run: dict[str, Any]) -> str:
    what, _, when = run["fault"]
    again = (
        "went on"
        if run["recovery_s"] is None
        else f"recovered in {run['recovery_s']} s, {run['lost_steps']} steps lost"
    )
    came = run["wrong"] or f"same bits, {again}"
    where = f"at step {run['at_step']}, {run['trainers']} trainers, rows in {run['rows']}"
    return f"{run['number']:3}  {what} a memory node while {when}, {where}: {came}"
