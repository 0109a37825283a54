"""Run the battery under one fault after another, each in a fork of this process, which has already imported torch.

`python -m tests.faults.run AREA [FAULT...]` prints a JSON object: what caught each fault, null if nothing did. Without
names it plants all faults of the area, and then none, under the name "". The sources are changed as they are imported,
never on disk. Run areas that are not COMPILED with NUMBA_DISABLE_JIT=1, so that kernels run from their source.
"""

import importlib.abc
import importlib.machinery
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from types import ModuleType

from tests.faults.catalogue import AREAS
from tests.faults.plant import Fault

COMPILED = ("disk", "frozen", "checkpoints", "sweep")
"""Areas without faults in Numba's kernels."""
ATTEMPTS = 3
"""A fault that needs a race may go unnoticed once on a busy machine. Each attempt has its own process, so that
leftovers of one cannot fail the next."""
LIMIT = 200.0
"""Seconds for one fault: ten times what it takes on an idle machine. Longer is a hang, and not a clear failure."""
TIMEOUT = 3.0
"""Seconds until a stage or a trainer counts as stuck."""


class Planted(importlib.machinery.SourceFileLoader):
    """Loads one module with a fault planted in it."""

    fault: Fault

    def get_code(self, fullname: str):
        return compile(self.fault.plant(self.get_source(fullname) or ""), self.path, "exec")


class Finder(importlib.abc.MetaPathFinder):
    """Finds the module to plant the fault in."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None):
        if fullname != f"skirl.{self._fault.module}":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        spec.loader = Planted(fullname, spec.origin)
        spec.loader.fault = self._fault
        return spec


def outcome(fault: Fault | None, area: str, shift: int) -> str | None:
    """Plant the fault and run the battery."""
    if fault:
        sys.meta_path.insert(0, Finder(fault))
    warnings.simplefilter("ignore")
    try:
        from tests import runs
        from tests.faults.battery import first_failure

        runs.TIMEOUT = TIMEOUT
        return first_failure(area, shift)
    except LookupError as error:
        return f"NOT PLANTED: {error}"
    except BaseException as error:  # the fault shows already at import
        return f"import: {type(error).__name__}: {error}"


def in_fork(fault: Fault | None, area: str, shift: int) -> str | None:
    """Return the outcome from a separate process, which may crash or hang."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read)
            result = outcome(fault, area, shift)
            os.write(write, json.dumps(result and result[:900]).encode())  # fits into the pipe's buffer
        finally:
            os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], LIMIT)
    if not ready:
        os.kill(child, signal.SIGKILL)
    data = os.read(read, 65536) if ready else b'"HUNG"'
    os.close(read)
    os.waitpid(child, 0)
    return json.loads(data or b'"CRASHED"')


def main() -> None:
    import torch

    torch.set_num_threads(1)
    area, *names = sys.argv[1:]
    results = {}
    for fault in AREAS[area]:
        if names and fault.name not in names:
            continue
        started = time.monotonic()
        tried = (in_fork(fault, area, shift) for shift in range(ATTEMPTS))
        results[fault.name] = next(filter(None, tried), None)
        print(f"{time.monotonic() - started:5.1f} s  {fault.name}: {results[fault.name]}"[:300], file=sys.stderr)
    if not names:
        results[""] = in_fork(None, area, list(AREAS).index(area))  # each area has its own seeds
    print(json.dumps(results))


if __name__ == "__main__":
    main()
