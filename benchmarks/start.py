"""Claim: compiled kernels are loaded in a fraction of a second ("Start" in docs/performance.md)."""

from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from common import Bench, main, printed, result, started


@dataclass(frozen=True)
class Start(Bench):
    """CPU time that the kernels of a first training step cost, when compiled and when loaded from disk."""

    dim: int = 64
    """Numbers in a row."""

    def run(self) -> dict[str, Any]:
        """Train in two processes in sequence, the first with an empty kernel cache, and return the figures."""
        facts = {}
        with TemporaryDirectory() as folder:
            for state in ("cold", "warm"):
                first, second = printed(started(["-c", _CHILD, str(self.dim)], {"NUMBA_CACHE_DIR": folder}))
                facts |= {f"{state}_kernels": round(first - second, 3), f"{state}_steps": round(second, 3)}
        return result("start", self, "dim", **facts)


_CHILD = """
import json, sys, time
import torch
torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports its compiler, which is none of ours
from skirl.cli.train import Train
times = [time.process_time()]
for _ in range(2):
    more = {"dim": int(sys.argv[1]), "threads": 1, "quiet": True}
    Train.of(data="synthetic:tiny", model="dlrm-tiny", batch=64, steps=4, cache="touched:50%", **more).run()
    times.append(time.process_time())
print(json.dumps([after - before for before, after in zip(times, times[1:])]))
"""


if __name__ == "__main__":
    main(Start)
