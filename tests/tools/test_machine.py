"""Memory on Linux, and on macOS, which has no /proc and counts in other units: its answers are planted."""

import os
import platform
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skirl.tools import machine

VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10100.
Pages active:                            300000.
Pages inactive:                           20020.
Pages speculative:                         1003.
Pages throttled:                              0.
Pages wired down:                        100000.
Pages purgeable:                           5000.
"""


def macos(monkeypatch: pytest.MonkeyPatch, vm_stat: Callable[..., Any]) -> None:
    """Have the system look like macOS."""
    sysconf = {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 1 << 20}

    def by_name(name: str) -> int:
        if name not in sysconf:
            raise ValueError("unrecognized configuration name")
        return sysconf[name]

    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(os, "sysconf", by_name)
    monkeypatch.setattr(machine, "Path", lambda path: Path("/no-such-folder") / path.lstrip("/"))
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3 << 30))
    monkeypatch.setattr(subprocess, "run", vm_stat)


def test_macos_tells_its_free_memory_by_vm_stat(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **named: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(stdout=VM_STAT)

    macos(monkeypatch, run)
    assert machine.free_bytes() == (10100 + 20020 + 1003) * 16384 and asked == [["/usr/bin/vm_stat"]]


@pytest.mark.parametrize(
    "error", [FileNotFoundError("vm_stat"), subprocess.CalledProcessError(1, "vm_stat")], ids=["none", "fails"]
)
def test_all_memory_counts_as_free_where_nothing_else_is_told(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def run(*args: Any, **named: Any) -> Any:
        raise error

    macos(monkeypatch, run)
    assert machine.free_bytes() == 16384 << 20


def test_linux_counts_cached_file_pages_as_free_and_keeps_to_the_limit_of_the_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / path.lstrip("/"))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemFree: 100 kB\nMemAvailable: 500 kB\n")
    assert machine.free_bytes() == 500 << 10
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for most, current, free in (("max", 1, 500 << 10), ("600000", 400_000, 200_000), ("600000", 700_000, 0)):
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text(f"{current}\n")
        assert machine.free_bytes() == free
