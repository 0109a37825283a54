"""Claim: compiled kernels are loaded in a fraction of a second ("Start" in docs/performance.md).

The cost of kernels in a first training step: with none cached on disk, and with all of them.
"""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import Stopwatch, child, main, result


@dataclass(frozen=True)
class Start:
    """CPU time that the kernels of a first training step cost, when compiled and when loaded from disk."""

    dim: int = 64
    """Numbers in a row."""

    def run(self) -> dict[str, Any]:
        """Train in two processes in sequence, the first with an empty kernel cache, and return the figures."""
        with TemporaryDirectory() as folder:
            cold, warm = (self._child(Path(folder)) for _ in range(2))
            kept = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        facts = {f"cold_{name}": value for name, value in cold.items()}
        facts |= {f"warm_{name}": value for name, value in warm.items()}
        return result("start", self, "dim", **facts, cache_bytes=kept)

    def _child(self, folder: Path) -> dict[str, float]:
        with Stopwatch() as watch:
            imported, first, second = child(["-c", _CHILD, str(self.dim)], {"NUMBA_CACHE_DIR": str(folder)})
        times = {"kernels": first - second, "imports": imported, "steps": second, "process": watch.seconds}
        return {name: round(seconds, 3) for name, seconds in times.items()}


_CHILD = """
import json, sys, time
import torch
torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports its compiler, which is none of ours
from skirl.cli.train import Train
times = [0, time.process_time()]
for _ in range(2):
    more = {"dim": int(sys.argv[1]), "threads": 1, "quiet": True}
    Train.of(data="synthetic:tiny", model="dlrm-tiny", batch=64, steps=4, cache="touched:50%", **more).run()
    times.append(time.process_time())
print(json.dumps([after - before for before, after in zip(times, times[1:])]))
"""


if __name__ == "__main__":
    main(Start)
