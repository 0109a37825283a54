"""The machine that a figure was measured on, and how much memory there is."""

import os
import platform
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

from skirl.tools.sealed_json import skirl_version


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Return the processor, its cores, threads and versions; nothing that names the machine or its user.

    >>> machine()["cores"] >= 1
    True
    """
    import torch  # takes 1.4 s, which help and wrong flags do without

    return {
        "processor": _processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "skirl": skirl_version(),
    }


def peak_bytes() -> int:
    """Return the most memory that this process has held, in bytes.

    getrusage is asked only if nothing else tells, because its figure starts at the peak of the parent process.

    >>> peak_bytes() > 1 << 20
    True
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if platform.system() == "Darwin" else most << 10  # Linux counts in KiB


def free_bytes() -> int:
    """Return the bytes that this process can still get: free memory of the system or, if less, of its control group.

    >>> free_bytes() > 1 << 20
    True
    """
    free = _free_of_system()
    with suppress(OSError, ValueError):  # not Linux, or no limit
        group = Path("/sys/fs/cgroup")
        most = (group / "memory.max").read_text().strip()
        if most != "max":
            free = min(free, int(most) - int((group / "memory.current").read_text()))
    return max(0, free)


def _free_of_system() -> int:
    """Return the bytes that the system can give to processes; cached file pages count as free."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # not Linux: all counts as free


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
