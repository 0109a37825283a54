"""The machine that a figure was measured on, and how much memory there is."""

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from skirl.tools import __version__


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """Return the processor, its cores, threads and versions; nothing that names the machine or its user."""
    import torch  # takes 1.4 s, which help and wrong flags do without

    return {
        "processor": _found("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "skirl": __version__,
    }


def peak_bytes() -> int:
    return int((_found("/proc/self/status", "VmHWM:") or "0").split()[0]) << 10


def free_bytes() -> int:
    """Return the bytes that this process can still get: free memory of the system or, if less, of its control group."""
    free = int((_found("/proc/meminfo", "MemAvailable:") or "0").split()[0]) << 10  # cached file pages count as free
    with suppress(OSError, ValueError):  # no group, or "max": no limit
        group = Path("/sys/fs/cgroup")
        most, current = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, most - current)
    return max(0, free)


def _found(path: str, name: str) -> str | None:
    """Return the rest of the first line that begins with a name, or None if the system has no such file."""
    with suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(name):
                return line.removeprefix(name).strip("\t\n: ")
    return None
