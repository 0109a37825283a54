"""A real interpreter for what a fork cannot show, and waiting for threads that a fork would lose."""

import json
import os
import subprocess
import sys
import time
from typing import Any


def interpreter(code: str, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a real interpreter, which takes seconds to import torch."""
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False, **more)


STATUS = """
import json, sys
import numpy as np
from skirl.store import DiskStore, MemoryStore, Record

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
"""


def measure(code: str, *args: object) -> dict[str, float]:
    """Run code that prints what it measured of its own memory, with compiled kernels."""
    done = interpreter(STATUS + code, *map(str, args), env=os.environ | {"NUMBA_DISABLE_JIT": "0"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def alone() -> None:
    """Wait for joined threads to disappear, which takes the system a moment."""
    until = time.monotonic() + 100
    while len(os.listdir("/proc/self/task")) > 1:
        assert time.monotonic() < until, "threads are lost in a fork"
        time.sleep(0.01)
