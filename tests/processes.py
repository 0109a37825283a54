"""A real interpreter for what a fork cannot show, and waiting for threads that a fork would lose."""

import os
import subprocess
import sys
import time
from typing import Any


def interpreter(code: str, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a real interpreter, which takes seconds to import torch."""
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False, **more)


def alone() -> None:
    """Wait for joined threads to disappear, which takes the system a moment."""
    until = time.monotonic() + 100
    while len(os.listdir("/proc/self/task")) > 1:
        assert time.monotonic() < until, "threads are lost in a fork"
        time.sleep(0.01)
