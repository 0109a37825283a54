"""What the benchmarks share: their command line, checks of flags, a stopwatch, child processes, parts of a result."""

import datetime
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import make_dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np

from skirl.tools.machine import cores
from skirl.tools.os_errors import writing


def main(command: type) -> None:
    """Read a dataclass of flags from the command line, run it, and print its result: text, or JSON with --json."""
    import tyro

    name = Path(sys.argv[0]).name
    record = Annotated[
        Path | None, tyro.conf.arg(help="Write the result, with date and commit, to this JSON file too.")
    ]
    frozen = command.__dataclass_params__.frozen  # type: ignore[attr-defined]
    flags = make_dataclass(command.__name__, [("record", record, None)], bases=(command,), kw_only=True, frozen=frozen)
    flags.__module__ = command.__module__
    try:
        run: Any = tyro.cli(
            flags, prog=f"python benchmarks/{name}", description=command.__doc__, config=(tyro.conf.FlagCreatePairsOff,)
        )
    except ValueError as error:
        sys.exit(f"{name}: {error}")
    result = run.run()
    if run.record is not None:
        with writing(run.record):
            run.record.parent.mkdir(parents=True, exist_ok=True)
            run.record.write_text(json.dumps({"date": str(datetime.date.today()), "commit": commit()} | result) + "\n")
    if getattr(run, "json", False):
        print(json.dumps(result))
    else:
        print("\n".join(f"{label:<18}{text}" for label, text in run.summary(result).items()))
    if result.get("failed"):
        sys.exit(f"{name}: {result['failed']}")


def commit() -> str | None:
    """Return the commit of this checkout, with -dirty if files have changed since, or None outside of one."""
    ran = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--match="],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return ran.stdout.strip() or None


def machine() -> dict[str, Any]:
    """Return the processor, its cores, threads and versions; nothing that names the machine or its user."""
    import torch

    return {
        "processor": _processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def at_least_one(flags: Any, *names: str) -> None:
    """Raise if one of these flags is below 1."""
    for name in names:
        if getattr(flags, name) < 1:
            raise ValueError(f"{name} is {getattr(flags, name)}: set it to 1 or more")


def made_folder(folder: Path | None) -> Path | None:
    """Make the folder that a flag names, if it is not there, and return it."""
    if folder is not None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    return folder


def result(bench: str, flags: Any, names: str, **figures: Any) -> dict[str, Any]:
    """Return a benchmark's result: its name, the flags in `names` (separated by spaces), the figures, the machine."""
    return {
        "bench": bench, **{name: getattr(flags, name) for name in names.split()}, **figures, "machine": machine(),
    }  # fmt: skip


def read_trace(path: Path) -> np.ndarray:
    """Return the ids of a trace: a .npy file with an integer array of one dimension."""
    if path.suffix != ".npy" or not path.is_file():
        raise ValueError(f"trace is {str(path)!r}: set it to a .npy file, which traffic.py --make writes")
    ids = np.load(path, allow_pickle=False)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"trace {path.name} has shape {list(ids.shape)} of {ids.dtype}: save one dimension of ids")
    return ids


class Stopwatch:
    """A stopwatch for a block."""

    seconds: float
    """Wall clock time."""
    cpu: float
    """CPU time, over all threads of this process."""

    def __enter__(self) -> Self:
        self._began, self._used = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds, self.cpu = time.perf_counter() - self._began, time.process_time() - self._used


def seconds(call: Callable[..., Any], *args: Any) -> float:
    """Return the wall clock time of a call."""
    with Stopwatch() as watch:
        call(*args)
    return watch.seconds


def processes(count: int, arguments: Sequence[str]) -> list[Any]:
    """Run the trainers of one job, a Python process each, and return the last line that each prints, parsed as JSON."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    names = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | {k: str(v) for k, v in (names | {"RANK": rank, "LOCAL_RANK": rank}).items()},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"one of {count} measuring processes failed; it said why above")
    return [json.loads(lines.splitlines()[-1]) for lines in said]


def child(arguments: Sequence[str], env: Mapping[str, str] = {}) -> Any:
    """Run another Python process and return the last line that it prints, parsed as JSON."""
    ran = subprocess.run([sys.executable, *arguments], env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        raise RuntimeError(f"the measuring process ended with exit code {ran.returncode}; it said why above")
    return json.loads(ran.stdout.splitlines()[-1])
