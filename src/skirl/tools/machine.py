"""The machine that a figure was measured on, and how much memory there is."""

import os
import platform
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

from skirl.tools import __version__


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """Return torch's threads if the environment sets them, else one for each core but that of the planner."""
    import torch

    return torch.get_num_threads() if os.environ.get("OMP_NUM_THREADS") else max(1, cores() - 1)


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
    """Return the most memory that this process has held, in bytes.

    getrusage is asked only if nothing else tells, because its figure starts at the peak of the parent process.
    """
    if (text := _found("/proc/self/status", "VmHWM:")) is not None:
        return int(text.split()[0]) << 10
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if platform.system() == "Darwin" else most << 10  # Linux counts in KiB


def free_bytes() -> int:
    """Return the bytes that this process can still get: free memory of the system or, if less, of its control group."""
    if (text := _found("/proc/meminfo", "MemAvailable:")) is not None:  # cached file pages count as free
        free = int(text.split()[0]) << 10
    else:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # not Linux, or no limit
        group = Path("/sys/fs/cgroup")
        most = (group / "memory.max").read_text().strip()
        if most != "max":
            free = min(free, int(most) - int((group / "memory.current").read_text()))
    return max(0, free)


def _found(path: str, name: str) -> str | None:
    """Return the rest of the first line that begins with a name, or None if the system has no such file."""
    with suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(name):
                return line.removeprefix(name).strip("\t\n: ")
    return None
