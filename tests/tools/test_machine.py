"""How much memory is free, with planted answers of the system."""

from pathlib import Path

import pytest

from skirl.tools import machine


def test_cached_file_pages_are_free_and_the_limit_of_the_group_holds(
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
