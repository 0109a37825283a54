"""What compiling costs a first training step: with no kernel cached on disk, and with all of them.

Numba compiles a kernel at its first call; the result is kept on disk (skirl.tools.kernel_cache). Two child processes
train some steps with an empty folder there, one after the other: the first compiles, the second loads. Each then trains
the same steps once more, all kernels being there; the difference is what the kernels cost. Seconds are those of the
processor, so that a busy machine does not show. Compiling at installation would hide the first figure and need a
compiled package for each processor.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from skirl.tools.kernel_cache import kernel_folder
from skirl.tools.machine import machine
from skirl.train.recipe import OptimizerName


@dataclass(frozen=True)
class Start:
    """Processor seconds that the kernels of a first training step cost, to compile them and to load them from disk."""

    optimizer: OptimizerName = "rowwise-adagrad"
    """The optimizer of the rows."""
    dim: int = 64
    """Numbers in a row."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ValueError(f"dim is {self.dim}: set it to 1 or more")

    def run(self) -> dict[str, Any]:
        """Train one step in two processes, one after the other."""
        with TemporaryDirectory() as folder:
            cold, warm = (self._child(Path(folder)) for _ in range(2))
            kept = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        facts = {f"cold_{name}": value for name, value in cold.items()}
        facts |= {f"warm_{name}": value for name, value in warm.items()}
        return {"bench": "start", **asdict(self), **facts, "cache_bytes": kept, "machine": machine()}

    def _child(self, folder: Path) -> dict[str, float]:
        begun = time.perf_counter()
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, str(self.dim), self.optimizer],
            env={**os.environ, "NUMBA_CACHE_DIR": str(folder)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if child.returncode:
            raise RuntimeError(f"the training process ended with exit code {child.returncode}; it said why above")
        imported, first, second = json.loads(child.stdout.splitlines()[-1])
        whole = time.perf_counter() - begun
        times = {"kernels": first - second, "imports": imported, "steps": second, "process": whole}
        return {name: round(seconds, 3) for name, seconds in times.items()}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """The result as people read it."""
        return {
            "cold": f"{result['cold_kernels']:.2f} s to compile all kernels of a first step, of the processor",
            "warm": f"{result['warm_kernels']:.2f} s to load them from {result['cache_bytes'] >> 10:,} KiB on disk",
            "kept in": str(kernel_folder() or "no folder can be written to: set NUMBA_CACHE_DIR to one"),
            "imports": f"{result['warm_imports']:.2f} s, most of it torch",
            "steps": f"{result['warm_steps']:.2f} s for the model, its tables and four steps, all kernels being there",
            "process": f"{result['cold_process']:.1f} s cold, {result['warm_process']:.1f} s warm on the clock, all twice",
        }


_CHILD = """
import json, sys, time
import torch
torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports its compiler, which is none of ours
from skirl.train.train import Train
times = [0, time.process_time()]
for _ in range(2):
    more = {"dim": int(sys.argv[1]), "optimizer": sys.argv[2], "threads": 1, "quiet": True}
    Train("synthetic:tiny", "dlrm-tiny", batch=64, steps=4, cache="touched:50%", **more).run()
    times.append(time.process_time())
print(json.dumps([after - before for before, after in zip(times, times[1:])]))
"""
