"""The cost of kernels in a first training step: with none cached on disk, and with all of them."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from skirl.core.optimizer_names import OptimizerName
from skirl.measure.bench.helpers import Stopwatch, at_least_one, child, result


@dataclass(frozen=True)
class Start:
    """CPU time that the kernels of a first training step cost, when compiled and when loaded from disk."""

    optimizer: OptimizerName = "rowwise-adagrad"
    """The optimizer of the rows."""
    dim: int = 64
    """Numbers in a row."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        at_least_one(self, "dim")

    def run(self) -> dict[str, Any]:
        """Train in two processes in sequence, the first with an empty kernel cache, and return the figures."""
        with TemporaryDirectory() as folder:
            cold, warm = (self._child(Path(folder)) for _ in range(2))
            kept = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        facts = {f"cold_{name}": value for name, value in cold.items()}
        facts |= {f"warm_{name}": value for name, value in warm.items()}
        return result("start", self, "optimizer dim json", **facts, cache_bytes=kept)

    def _child(self, folder: Path) -> dict[str, float]:
        with Stopwatch() as watch:
            imported, first, second = child(
                ["-c", _CHILD, str(self.dim), self.optimizer], {"NUMBA_CACHE_DIR": str(folder)}
            )
        times = {"kernels": first - second, "imports": imported, "steps": second, "process": watch.seconds}
        return {name: round(seconds, 3) for name, seconds in times.items()}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as text for a reader, by label."""
        from skirl.tools.kernel_cache import kernel_folder

        return {
            "cold": f"{result['cold_kernels']:.2f} s of CPU time to compile all kernels of a first step",
            "warm": f"{result['warm_kernels']:.2f} s to load them from {result['cache_bytes'] >> 10:,} KiB on disk",
            "kept in": str(kernel_folder() or "no folder can be written to: set NUMBA_CACHE_DIR to one"),
            "imports": f"{result['warm_imports']:.2f} s, most of it torch",
            "steps": f"{result['warm_steps']:.2f} s for the model, its tables and four steps, with all kernels loaded",
            "process": f"{result['cold_process']:.1f} s on the clock for two runs cold, {result['warm_process']:.1f} s warm",
        }


_CHILD = """
import json, sys, time
import torch
torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports its compiler, which is none of ours
from skirl.train.commands import Train
times = [0, time.process_time()]
for _ in range(2):
    more = {"dim": int(sys.argv[1]), "optimizer": sys.argv[2], "threads": 1, "quiet": True}
    Train.of(data="synthetic:tiny", model="dlrm-tiny", batch=64, steps=4, cache="touched:50%", **more).run()
    times.append(time.process_time())
print(json.dumps([after - before for before, after in zip(times, times[1:])]))
"""
