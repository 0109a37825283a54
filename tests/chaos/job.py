"""A job over several nodes, all on this machine, that a fault hits at a random moment."""

import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from skirl.checkpoint import codec
from skirl.checkpoint import folder as folders
from skirl.checkpoint.codec import decode
from skirl.checkpoint.folder import headers_with_steps
from skirl.checkpoint.import_rows import opened
from skirl.nn.collection import collections_of
from skirl.peers.processes import die_with_parent
from skirl.train.run_folder import lines_of
from tests.store.remote.nodes import free_ports

HUNG = 1800.0
"""Seconds after which a job counts as hung, on the slowest machine."""
TIMEOUT = 8.0
"""Seconds that trainers wait for each other, and for a memory node."""
ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # or a restarted group reads the addresses of the one before
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "SKIRL_RUNS": "none",
    "SKIRL_TIMEOUT": f"{TIMEOUT:g}",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
LAUNCH = (
    "-m torch.distributed.run --nnodes=1:4 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} "
    "--rdzv-conf=join_timeout=60,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=30 --rdzv-id=chaos "
    "--max-restarts=100 --monitor-interval=0.2 --local-addr=127.0.0.1"
)
LOOP = "while ! {command}; do sleep 0.2\ndone"
"""The shell loop that starts a command again whenever it fails."""


class Fault(NamedTuple):
    """stop: pause for less than timeout; cut: for longer; lose: kill a node for good, or delete a memory node's rows."""

    what: str
    whom: str
    when: str


class Supervised:
    """A shell that starts a command of Python again whenever it fails."""

    def __init__(self, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        with log.open("ab") as out:
            command = LOOP.format(command=shlex.join([sys.executable, *words]))
            self.shell = subprocess.Popen(
                ["sh", "-c", command], stdout=out, stderr=out, env=environment, preexec_fn=die_with_parent
            )

    def end(self) -> None:
        """Kill it, for good: the shell first."""
        for pid in family(self.shell.pid):
            send(pid, signal.SIGKILL)
        self.shell.wait()


class MemoryNodes:
    """Two memory nodes."""

    def __init__(self, rows: str, folder: Path) -> None:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        self.spec = ",".join(f"rpc://{address}" for address in addresses)
        self.nodes = [
            Supervised(
                f"-m skirl serve {address} --store {rows.format(i)}".split(),
                folder / f"node-{i}.log",
                os.environ | ENVIRONMENT,
            )
            for i, address in enumerate(addresses)
        ]

    def send(self, node: int, number: int) -> list[int]:
        """Send a signal to all processes of a node, and return their ids."""
        pids = family(self.nodes[node].shell.pid)[1:]
        for pid in pids:
            send(pid, number)
        return pids

    def end(self) -> None:
        for node in self.nodes:
            node.end()


class Node(Supervised):
    """A node of trainers: a shell that supervises a launcher, the launcher, its trainer."""

    def __init__(self, flags: Mapping[str, Any], port: int, log: Path, pause: float) -> None:
        words = [*LAUNCH.format(port=port).split(), "--", str(Path(__file__).with_name("trainer.py"))]
        for name, value in flags.items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        super().__init__(words, log, os.environ | ENVIRONMENT | {"CHAOS_PAUSE": str(pause)})
        self.lost = False

    @property
    def launcher(self) -> list[int]:
        """Its launcher's process id, if there is one at the moment."""
        return [pid for pid in family(self.shell.pid)[1:2] if b"torch.distributed.run" in _command(pid)]

    @property
    def trainers(self) -> list[int]:
        """The process ids of what its launcher has started."""
        return [pid for launcher in self.launcher for pid in family(launcher)[1:]]

    def end(self) -> None:
        self.lost = True
        super().end()


def family(pid: int) -> list[int]:
    """Return the ids of a process and all its descendants, itself first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def send(pid: int, number: int) -> None:
    """Send a signal to a process, which may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


class Job:
    """A run over some nodes; its rows are at the trainers, or on memory nodes, which the fault then hits."""

    def __init__(
        self, fault: Fault, rng: random.Random, folder: Path, flags: dict[str, Any], memory: MemoryNodes | None = None
    ) -> None:
        self.nodes: list[Node] = []
        self.ignored: tuple[int, int] | None = None
        """The step of a whole checkpoint, and that of an older one from which the job went on."""
        self._fault, self._rng, self._folder, self._flags, self._memory = fault, rng, folder, flags, memory
        self._until, self._port, self._stopped = time.monotonic() + HUNG, free_ports(1)[0], list[int]()
        self._disk = rng.random() < 0.5
        trainers = rng.choice((1, 2)) if memory or fault.what == "gain" else rng.choice((2, 2, 3))
        for _ in range(1 if fault.what == "gain" else trainers):
            self._add()

    def run(self) -> None:
        """Hit the job and wait until it is over. Raise TimeoutError if it never is."""
        every, steps, fault = self._flags["save_every"], self._flags["steps"], self._fault
        at = self._rng.randrange(every // 2, every if fault.what == "gain" else steps - 2 * every)
        self._wait(lambda: self.step >= at)
        if fault.when == "saving":
            self._wait(lambda: self._saving or self.step >= at + every + 1)
        whole = next((step for step, _ in headers_with_steps(self._folder / "saves")), 0)
        begun = self._begun
        self._hit(fault)
        if fault.when == "restarting":
            self._wait(lambda: self._begun != begun)
            begun = self._begun
            self._hit(Fault("kill", fault.whom if fault.what == "kill" else "trainer", "training"))
        paused = TIMEOUT * (self._rng.uniform(0.1, 0.5) if fault.what == "stop" else self._rng.uniform(1.5, 2.5))
        let_go = time.monotonic() + paused
        while not self.over:
            if self._stopped and time.monotonic() > let_go:
                for pid in self._stopped:
                    send(pid, signal.SIGCONT)
                self._stopped = []
            if self._begun not in (0, begun) and self.ignored is None:
                with suppress(OSError, ValueError):  # a run that begins again is just replacing it
                    changed = self._begun
                    since = json.loads((self._folder / "run" / "config.json").read_text())["begun_at"]
                    self.ignored, begun = ((whole, since) if since < whole else None), changed
            self._tick()

    def end(self) -> None:
        """Kill whatever still runs."""
        for node in self.nodes:
            node.end()

    @property
    def step(self) -> int:
        """The newest step in the run's metrics; 0 if there is none."""
        with suppress(OSError, ValueError, IndexError):
            return int(json.loads((self._folder / "run" / "metrics.jsonl").read_bytes().split(b"\n")[-2])["step"])
        return 0

    @property
    def over(self) -> bool:
        """True if all nodes have ended that are not lost."""
        return all(node.lost or node.shell.poll() is not None for node in self.nodes)

    @property
    def _begun(self) -> int:
        """Modification time of config.json, which changes each time the run starts over; 0 if there is no file."""
        with suppress(OSError):
            return (self._folder / "run" / "config.json").stat().st_mtime_ns
        return 0

    @property
    def _saving(self) -> bool:
        """True if rows of a checkpoint are there but not its header."""
        with suppress(OSError):
            rows, headers = (
                [path.stat().st_mtime_ns for path in (self._folder / "saves").glob(name)]
                for name in ("rows/*", "checkpoint-*.json")
            )
            return max(rows, default=0) > max(headers, default=0)
        return False

    def _add(self) -> None:
        number = len(self.nodes)
        store = (
            self._memory.spec if self._memory else f"disk:{self._folder / f'rows-{number}'}" if self._disk else "memory"
        )
        more = {"store": store, "resume": True, "peer_timeout": TIMEOUT}
        pause = 0.4 if self._fault.what == "gain" else 0.1
        self.nodes.append(Node(self._flags | more, self._port, self._folder / f"trainer-{number}.log", pause))

    def _hit(self, fault: Fault) -> None:
        alive, number = [node for node in self.nodes if not node.lost], signal.SIGSTOP
        if fault.whom == "memory":
            assert self._memory is not None
            node = self._rng.randrange(len(self._memory.nodes))
            pids = self._memory.send(node, signal.SIGSTOP if fault.what in ("stop", "cut") else signal.SIGKILL)
            self._stopped = pids if fault.what in ("stop", "cut") else []
            if fault.what == "lose":
                shutil.rmtree(self._folder / "nodes" / str(node), ignore_errors=True)
        elif fault.what == "gain":
            self._add()
        elif fault.what == "lose":
            self._rng.choice(alive).end()
        else:
            node = alive[0] if fault.whom == "rendezvous" else self._rng.choice(alive)  # the first one serves that
            pids = node.trainers if fault.whom == "trainer" else node.launcher
            pids = pids + node.trainers if fault.whom == "node" else pids
            number = signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP
            for pid in pids:
                send(pid, number)
            self._stopped = [] if fault.what == "kill" else pids

    def _wait(self, until: Callable[[], bool]) -> None:
        while not (until() or self.over):
            self._tick()

    def _tick(self) -> None:
        if time.monotonic() > self._until:
            raise TimeoutError(f"the job hangs at step {self.step}; see {self._folder}")
        time.sleep(0.02)


def digests(folder: Path) -> dict[str, Any]:
    """Return digests of losses, rows and dense weights in a run's newest checkpoint, and how many lines its metrics lack."""
    with opened(folder / "saves") as found:
        body = folders.read(found.header)
        run = decode(body["run"], codec.read_dense(found.header.parent, body["dense"]))
        (watched,) = (of["state"]["so_far"] for of in run["optimizers"] if "so_far" in of["state"])
        (collection,) = collections_of(found.rows).values()
        engine = collection.engine
        keys = np.sort(np.concatenate([np.empty(0, np.int64), *engine.store.held()]))
        records = np.empty((len(keys), engine.packs[0].widths[0]), engine.dtype)
        engine.store.read(keys, records)
        dense = b"".join(name.encode() + value.numpy().tobytes() for name, value in sorted(found.dense.items()))
        return {
            "losses": watched["digest"],
            "rows": hashlib.sha256(keys.tobytes() + records.tobytes()).hexdigest(),
            "dense weights": hashlib.sha256(dense).hexdigest(),
            "missing lines": watched["steps"] - len({line["step"] for line in lines_of(folder / "run")}),
        }
