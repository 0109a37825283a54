"""`skirl bench faults`: trainers, launchers and nodes are killed, stopped, cut off, lost and gained during a job, which has
to end by itself with the same bits as an undisturbed one.
"""

import gc
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from skirl.measure.bench.helpers import at_least_one, made_folder
from skirl.measure.bench.nodes import ENVIRONMENT, BenchNode, alone, forked, send, threads
from skirl.tools.machine import machine


class Fault(NamedTuple):
    """A fault that hits a run."""

    what: Literal["kill", "stop", "cut", "lose", "gain"]
    whom: Literal["trainer", "launcher", "rendezvous", "node"]
    when: Literal["training", "saving", "restarting"]


FAULTS = (
    Fault("kill", "trainer", "saving"),
    Fault("stop", "trainer", "training"),
    Fault("kill", "rendezvous", "training"),
    Fault("lose", "node", "training"),
    Fault("gain", "node", "restarting"),
    Fault("kill", "launcher", "training"),
    Fault("cut", "node", "training"),
    Fault("kill", "trainer", "restarting"),
    Fault("stop", "rendezvous", "saving"),
    Fault("lose", "node", "saving"),
    Fault("gain", "node", "training"),
    Fault("kill", "rendezvous", "restarting"),
)
"""The runs take these in turn: of 12 runs two lose a node and two gain one."""
SEEDS = 1000
DELAY = {"gain": 200}
"""Delay of a row on the emulated link in milliseconds, 50 for other faults: steps take a while without computing."""


@dataclass(frozen=True)
class Faults:
    """Runs over several nodes on this machine, each with a fault at a random moment."""

    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "training": ("steps", "batch", "every"),
        "limits": ("patience", "silence", "limit", "gigabytes"),
        "output": ("folder", "json"),
    }

    runs: int = 12
    """The number of runs; the kinds of faults take turns."""
    first: int = 0
    """The number of the first run, to repeat some of them."""
    seed: int = 0
    """Seed of the moments of faults and of whom they hit."""
    steps: int = 40
    """Steps in a run."""
    batch: int = 64
    """Samples in a step."""
    every: int = 6
    """Steps between two checkpoints; up to this many may be lost, or twice as many while one is written."""
    patience: float = 5.0
    """Seconds that trainers wait for each other."""
    silence: int = 30
    """Seconds of silence after which launchers take a node for lost; with fewer, a busy machine loses live nodes."""
    limit: float = 180.0
    """Seconds after which a run counts as hung."""
    gigabytes: float = 0.0
    """Gigabytes of rows and their state that a run starts with, over all nodes; a node reads its part when it
    recovers."""
    at_once: int = 1
    """Runs at the same time. They mostly wait, but recoveries take longer."""
    cold: bool = False
    """Start torchrun and its trainers as a user would, which adds seconds to each recovery. By default they are
    forked."""
    folder: Path | None = None
    """Where to keep the folder of each run until it ends; the system's temporary folder if not given. The folder of a
    run that fails stays."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        at_least_one(self, "runs", "steps", "batch", "every", "silence", "at_once")

    def run(self) -> dict[str, Any]:
        """Do all runs, `at_once` at a time, and return what came of them."""
        top = Path(tempfile.mkdtemp(dir=made_folder(self.folder), prefix="skirl-faults-"))
        os.environ |= {"OMP_NUM_THREADS": "1"} | ENVIRONMENT
        self._warm(top / "warm")
        more = InAFork(lambda: self._filled(top / "filled"), top / "filled.json").answer() if self.gigabytes else {}
        undisturbed = InAFork(lambda: self._undisturbed(top / "undisturbed", more), top / "undisturbed.json").answer()
        done = self._all(top, undisturbed, more)
        wrong = [run for run in done if run["wrong"]]
        if not wrong:
            shutil.rmtree(top)
        recovered = [run["recovery_s"] for run in done if run["recovery_s"] is not None and run["fault"][0] == "kill"]
        waited = [run["recovery_s"] for run in done if run["recovery_s"] is not None and run["fault"][0] != "kill"]
        return {
            "bench": "faults", **asdict(self), "folder": str(self.folder) if self.folder else None,
            "faults": sum(run["hit"] for run in done),
            "same_bits": len(done) - len(wrong),
            "recovery_s": _spread(recovered),
            "recovery_after_patience_s": _spread(waited),
            "lost_steps": max((run["lost_steps"] for run in done), default=0),
            "missing_lines": sum(run["missing_lines"] for run in done),
            "of_each": done,
            "machine": machine(),
            "failed": f"{len(wrong)} of {len(done)} runs: {wrong[0]['wrong']}; see {top}" if wrong else None,
        }  # fmt: skip

    def _flags(self, folder: Path) -> dict[str, Any]:
        flags = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": self.batch, "steps": self.steps}
        flags |= {"optimizer": "adam", "cache": "900", "shards": 4, "threads": 1, "depth": 5, "save": folder / "saves"}
        flags |= {"save_every": self.every, "keep": 2, "run": str(folder / "run"), "log_every": 1, "quiet": True}
        return flags | ({"dim": 16} if self.gigabytes else {})

    def _warm(self, folder: Path) -> None:
        """Import what trainers and launchers need and load the kernels, so that forked processes have them."""
        import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend
        import torch.distributed.launcher.api
        import torch.utils.tensorboard  # noqa: F401

        import skirl.peers.groups  # noqa: F401
        from skirl.peers.alone import Alone
        from skirl.peers.job import using
        from skirl.train.commands import Train

        if not self.cold:
            before = threads()
            with using(Alone()):  # otherwise forked trainers would be alone
                Train.of(**self._flags(folder) | {"steps": 2, "run": "none"}).run()
            alone(before)
        gc.collect()
        gc.freeze()  # collections in forks skip these objects, so their memory stays shared

    def _filled(self, folder: Path) -> dict[str, Any]:
        """Save a checkpoint with rows and return the flags of runs that begin from it."""
        from skirl.measure.bench.filled import fill

        more = fill(self._flags(folder), self.gigabytes, folder)
        return more | {"from_": str(more["from_"])}

    def _undisturbed(self, folder: Path, more: dict[str, Any]) -> dict[str, Any]:
        """Train in one process without a fault and return its digests."""
        from skirl.train.commands import Train

        if Train.of(**self._flags(folder) | more).run()["failed"]:
            raise RuntimeError("the undisturbed run failed")
        return digests(folder)

    def _all(self, top: Path, undisturbed: dict[str, Any], more: dict[str, Any]) -> list[dict[str, Any]]:
        """Do all runs, each watched by a process of its own, and return them by number."""
        left, at_work, done = list(range(self.first, self.first + self.runs)), list[InAFork](), []
        while left or at_work:
            while left and len(at_work) < self.at_once:
                number = left.pop(0)
                work = partial(self._one, number, top / f"run-{number}", undisturbed, more)
                at_work.append(InAFork(work, top / f"run-{number}.json"))
            for one in [one for one in at_work if one.done]:
                at_work.remove(one)
                done.append(one.answer())
                if not self.json:
                    print(_line(done[-1]), flush=True)
            time.sleep(0.02)
        return sorted(done, key=lambda run: run["number"])

    def _one(self, number: int, folder: Path, undisturbed: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        """Do one run and return what came of it."""
        fault = FAULTS[number % len(FAULTS)]
        folder.mkdir()
        run = Run(self, fault, random.Random(self.seed * SEEDS + number), folder, self._flags(folder) | more)
        began, wrong = time.monotonic(), None
        try:
            run.suffer()
        except TimeoutError as error:
            wrong = str(error)
        finally:
            for node in run.nodes:
                node.end()
        wrong = wrong or self._judged(run, folder, undisturbed)
        if wrong is None:
            shutil.rmtree(folder)
        return {
            "number": number, "fault": list(fault), "nodes": run.began_with, "store": run.store, "hit": run.hit,
            "at_step": run.at_step, "recovery_s": run.recovery, "lost_steps": run.lost_steps,
            "missing_lines": run.missing_lines, "seconds": round(time.monotonic() - began, 2),
            "wrong": wrong and f"run {number} ({' '.join(fault)}): {wrong}",
        }  # fmt: skip

    def _judged(self, run: "Run", folder: Path, undisturbed: dict[str, Any]) -> str | None:
        """Return what is wrong with a run that has ended, or None."""
        found = InAFork(lambda: digests(folder), folder / "digests.json").answer()
        run.missing_lines = found.pop("missing lines")
        if differ := [name for name in found if found[name] != undisturbed[name]]:
            return f"{', '.join(differ)} differ from those of the undisturbed run"
        if run.missing_lines:
            return f"{run.missing_lines} lines of metrics are missing"
        if run.ignored:
            return (
                f"it went on from step {run.ignored[1]}, though a whole checkpoint of step {run.ignored[0]} was there"
            )
        if run.lost_steps > 2 * self.every:  # training waits only for the checkpoint before the next one
            return f"{run.lost_steps} steps were lost, and a checkpoint is saved every {self.every}"
        return None

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as text for a reader, by label."""
        kills, others = result["recovery_s"], result["recovery_after_patience_s"]
        return {
            "faults": f"{result['faults']} in {self.runs} runs",
            "same bits": f"{result['same_bits']} of {self.runs} runs: all losses, rows and dense weights",
            "recovery": f"{kills['median']} s from a kill to the first new step, {kills['worst']} s at worst; "
            f"{others['median']} and {others['worst']} s with patience of {self.patience:g} s or a join in it",
            "lost steps": f"{result['lost_steps']} at most; saved every {self.every}",
            "metrics": f"{result['missing_lines']} lines are missing",
        }


class InAFork:
    """Work in a forked process, which leaves no thread behind in this one.

    **Arguments**

    - `work`: returns something that JSON can represent.
    - `path`: the file to write the answer to; the process's output goes to a .log file next to it.
    """

    def __init__(self, work: Callable[[], Any], path: Path) -> None:
        self._path, self._log, self._code = path, path.with_suffix(".log"), None
        self._pid = forked(lambda: path.write_text(json.dumps(work())) and 0, self._log)

    @property
    def done(self) -> bool:
        """True if the process has ended."""
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = status if pid else None
        return self._code is not None

    def answer(self) -> Any:
        """Wait for the process to end and return its answer. Raise if it failed."""
        while not self.done:
            time.sleep(0.002)
        if self._code:
            raise RuntimeError(f"a process failed: {self._log.read_text()[-2000:]}")
        return json.loads(self._path.read_text())


class Run:
    """A run over some nodes. Watches its files to inflict the fault at its moment and to time the recovery."""

    def __init__(self, bench: Faults, fault: Fault, rng: random.Random, folder: Path, flags: dict[str, Any]) -> None:
        self.nodes: list[BenchNode] = []
        self.hit, self.lost_steps, self.at_step, self.missing_lines = 0, 0, 0, 0
        self.recovery: float | None = None
        self.ignored: tuple[int, int] | None = None
        self.store = rng.choice(["memory", "disk"])
        self.began_with = 3 if fault.what == "lose" and rng.random() < 0.3 else 1 if fault.what == "gain" else 2
        self._bench, self._fault, self._rng, self._folder, self._flags = bench, fault, rng, folder, flags
        self._until = time.monotonic() + bench.limit
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        for _ in range(self.began_with):
            self._add()

    def suffer(self) -> None:
        """Inflict the fault and watch until the run is over. Raise TimeoutError if it does not end."""
        fault, rng, bench = self._fault, self._rng, self._bench
        latest = bench.every if fault.what == "gain" else max(bench.every, bench.steps - 2 * bench.every)
        at = rng.randrange(bench.every // 2, latest)
        self._wait(lambda: self.step >= at)
        if fault.when == "saving":
            self._wait(lambda: self._saving or self.step >= at + bench.every + 1)
        hit_at, begun = self._hit(fault), self._begun
        if fault.when == "restarting":
            self._wait(lambda: self._begun != begun or self._over)
            time.sleep(rng.random() * 0.5)
            hit_at = self._hit(Fault("kill", fault.whom if fault.what == "kill" else "trainer", "training"))
            begun = self._begun
        before, stopped = self.step, list(self._stopped)
        let_go = hit_at + bench.patience * rng.uniform(1.5, 2.5)
        while not self._over:
            if stopped and time.monotonic() > let_go:
                for pid in stopped:
                    send(pid, signal.SIGCONT)
                stopped = []
            if self.recovery is None and self._begun != begun:
                if (since := self._begun_at) is not None:
                    self.lost_steps = max(self.lost_steps, before - since)
                    self.ignored = (self._whole, since) if since < self._whole else None
                    self._wait(lambda since=since: self.step > since or self._over)
                    self.recovery = round(time.monotonic() - hit_at, 2)
            elif self.recovery is None:
                before = max(before, self.step)
            self._tick()

    def _hit(self, fault: Fault) -> float:
        """Inflict the fault and return the time."""
        rng, alive = self._rng, [node for node in self.nodes if not node.lost]
        self.hit, self.at_step = self.hit + 1, self.step
        self._whole = self._whole_at()
        self._stopped: list[int] = []
        if fault.what == "gain":
            self._add()
            return time.monotonic()
        if fault.what == "lose":
            others = [node for node in alive if not node.serves] or alive
            rng.choice(others if rng.random() < 0.5 else alive).lose()
            return time.monotonic()
        hosts = [node for node in alive if node.serves]
        node = rng.choice(hosts if fault.whom == "rendezvous" and hosts else alive)
        pids = {"trainer": node.trainers, "node": node.processes}.get(fault.whom, [node.launcher])
        for pid in pids:
            send(pid, signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)
        self._stopped = [] if fault.what == "kill" else [pid for pid in pids if pid is not None]
        return time.monotonic()

    def _add(self) -> None:
        number = len(self.nodes)
        store = "memory" if self.store == "memory" else f"disk:{self._folder / f'rows-{number}'}"
        more = {"store": store, "resume": True, "peer_patience": self._bench.patience}
        more |= {"prefetch": 0, "link": f"10Gbit,{DELAY.get(self._fault.what, 50)}ms"}
        log = self._folder / f"node-{number}.log"
        self.nodes.append(BenchNode(self._flags | more, self._port, log, not self._bench.cold, self._bench.silence))

    @property
    def step(self) -> int:
        """The newest step in the run's metrics; 0 if there is none."""
        try:
            tail = (self._folder / "run" / "metrics.jsonl").read_bytes().split(b"\n")
            return int(json.loads(tail[-2])["step"]) if len(tail) > 1 else 0
        except (OSError, ValueError):
            return 0

    @property
    def _begun(self) -> int:
        """Modification time of config.json, which changes each time the run starts over; 0 if there is no file."""
        try:
            return (self._folder / "run" / "config.json").stat().st_mtime_ns
        except OSError:
            return 0

    @property
    def _begun_at(self) -> int | None:
        try:
            return int(json.loads((self._folder / "run" / "config.json").read_text())["begun_at"])
        except (OSError, ValueError):
            return None

    @property
    def _saving(self) -> bool:
        """True if parts of a checkpoint are there but not its header."""
        parts = {int(path.name.split("-")[1]) for path in (self._folder / "saves").glob("part-*")}
        return bool(parts - set(self._numbers()))

    def _numbers(self) -> list[int]:
        from skirl.checkpoint import numbers  # with torch, which help does not need

        return numbers(self._folder / "saves")

    def _whole_at(self) -> int:
        """Return the step of the newest whole checkpoint; 0 if there is none."""
        from skirl.checkpoint.best import headers_with_steps

        return next((step for step, _ in headers_with_steps(self._folder / "saves")), 0)

    @property
    def _over(self) -> bool:
        return all(node.lost or node.over for node in self.nodes)

    def _wait(self, until: Any) -> None:
        while not (until() or self._over):
            self._tick()

    def _tick(self) -> None:
        if time.monotonic() > self._until:
            raise TimeoutError(f"it did not end within {self._bench.limit:g} s; it is at step {self.step}")
        time.sleep(0.02)


def digests(folder: Path) -> dict[str, Any]:
    """Return digests of losses, rows and dense weights in a run's newest checkpoint, and how many lines its metrics lack."""
    import numpy as np

    from skirl.checkpoint import dense as dense_part
    from skirl.checkpoint import folder as folders
    from skirl.checkpoint.decoding import decode
    from skirl.checkpoint.without_model import opened
    from skirl.nn.collection import collections_of
    from skirl.train.report.run_folder import lines_of

    with opened(folder / "saves") as found:
        body = folders.read(found.header)
        run = decode(body["run"], dense_part.read(found.header.parent, body["dense"]))
        (watched,) = (of["state"]["so_far"] for of in run["optimizers"] if "so_far" in of["state"])
        (collection,) = collections_of(found.rows).values()
        engine = collection.engine
        keys = np.sort(np.concatenate([np.empty(0, np.int64), *engine.store.keys()]))
        rows = hashlib.sha256(keys.data)
        for start in range(0, len(keys), 1 << 18):
            part = keys[start : start + (1 << 18)]
            records = np.empty((len(part), engine.widths[0]), engine.dtype)
            engine.store.read(part, records)
            rows.update(records.data)
        dense = b"".join(name.encode() + value.numpy().tobytes() for name, value in sorted(found.dense.items()))
    return {
        "losses": watched["digest"],
        "rows": rows.hexdigest(),
        "dense weights": hashlib.sha256(dense).hexdigest(),
        "missing lines": watched["steps"] - len({line["step"] for line in lines_of(folder / "run")}),
    }


def _spread(seconds: list[float]) -> dict[str, float | None]:
    return (
        {"median": round(statistics.median(seconds), 2), "worst": max(seconds)}
        if seconds
        else {"median": None, "worst": None}
    )


def _line(run: dict[str, Any]) -> str:
    what, whom, when = run["fault"]
    came = run["wrong"] or f"same bits, {run['lost_steps']} steps lost, recovered in {run['recovery_s']} s"
    where = f"at step {run['at_step']}, {run['nodes']} nodes, {run['store']}"
    return f"{run['number']:3}  {what} {whom} while {when}, {where}: {came}"
