"""Run the battery under one fault after another, each in a fork of this process, which has already imported torch.

`python -m tests.faults.run AREA [N [FIRST]]` prints a JSON object: what caught each fault, or every N-th fault, and
null if nothing did. The sources are changed as they are imported, never on disk. Run it with NUMBA_DISABLE_JIT=1, so
that kernels run from their source; faults of the disk store are in no kernel.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from types import ModuleType

from tests.faults.plant import Fault
from tests.interpreter import quicken

DISK_AREAS = ("disk", "frozen")
"""Areas with faults in a store on disk, which has no kernels."""

ATTEMPTS = 3
"""A fault that needs a race may go unnoticed once on a busy machine. Each attempt has its own process, so that
leftovers of one cannot fail the next."""
COMPILED_AREAS = (*DISK_AREAS, "checkpoints", "gpu", "placement", "sweep")
"""Areas without faults in Numba's kernels, so these may be compiled."""
LIMIT = 120.0
"""Seconds for one fault: ten times what it takes on an idle machine. Longer is a hang, and not a clear failure."""
SLOW_LIMIT = 200.0
"""Seconds for faults that show only after thousands of opened stores or synced files, or with interpreted kernels."""


class Planted(importlib.machinery.SourceFileLoader):
    """Loads one module with a fault planted in it."""

    def __init__(self, fullname: str, path: str, fault: Fault) -> None:
        super().__init__(fullname, path)
        self._fault = fault

    def get_code(self, fullname: str):
        source = self.get_source(fullname)
        assert source is not None
        return compile(self._fault.plant(source), self.path, "exec")


class Finder(importlib.abc.MetaPathFinder):
    """Finds the module to plant the fault in."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None):
        if fullname != f"skirl.{self._fault.module}":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        spec.loader = Planted(fullname, spec.origin, self._fault)
        return spec


def outcome(fault: Fault | None, shift: int, area: str, third: int | None = None) -> str | None:
    """Plant the fault and run the battery, in a fork."""
    if fault:
        sys.meta_path.insert(0, Finder(fault))
    warnings.simplefilter("ignore")
    from tests import runs
    from tests.faults.battery import run_battery

    runs.PATIENCE = 3.0
    return run_battery(shift, area, not fault, third, fault.by if fault else "")


def in_fork(fault: Fault | None, shift: int, area: str, third: int | None = None) -> str | None:
    """Return the outcome from a separate process, which may crash or hang."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read)
            try:
                result = outcome(fault, shift, area, third)
            except LookupError as error:
                result = f"NOT PLANTED: {error}"
            except BaseException as error:  # the fault shows already at import
                result = f"import: {type(error).__name__}: {error}"
            os.write(write, json.dumps(result and result[:900]).encode())  # fits into the pipe's buffer
        finally:
            os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], SLOW_LIMIT if area in (*DISK_AREAS, "checkpoints", "gpu") else LIMIT)
    if not ready:
        os.kill(child, signal.SIGKILL)
    data = os.read(read, 65536) if ready else b'"HUNG"'
    os.close(read)
    os.waitpid(child, 0)
    return json.loads(data or b'"CRASHED"')


def main() -> None:
    import torch

    torch.set_num_threads(1)
    if sys.argv[1] == "gpu":
        quicken()  # it imports Triton
    from tests.faults.catalogue import AREAS

    results = {}
    every = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    for fault in AREAS[sys.argv[1]][first::every]:
        started = time.monotonic()
        tried = (in_fork(fault, shift, sys.argv[1]) for shift in range(ATTEMPTS))
        results[fault.name] = next(filter(None, tried), None)
        print(f"{time.monotonic() - started:5.1f} s  {fault.name}: {results[fault.name]}"[:300], file=sys.stderr)
    area = list(AREAS).index(sys.argv[1])
    # Run without a fault too, each area with its own seeds. If only some faults are planted, areas share the checks;
    # those that are compiled then run as tests of the same suite.
    skipped = every > 1 and sys.argv[1] in COMPILED_AREAS
    third = None if every == 1 else area % 3
    results[""] = None if skipped else in_fork(None, area, sys.argv[1], third)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
