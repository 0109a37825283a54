"""A disk that can be full: a small file system, if this process is allowed to mount one."""

import contextlib
import subprocess
from pathlib import Path

import pytest


class Disk:
    """A folder on its own file system of 48 MB. A test that needs it is skipped if none can be mounted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        if _run("mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(path)):
            pytest.skip("needs a file system of its own: run as root, where mounting is allowed")
        self._filler = path / "filler"

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 20)) == 1 << 20:
                pass
            while file.write(bytes(1 << 12)):
                pass

    def free(self) -> None:
        self._filler.unlink()

    def close(self) -> None:
        _run("umount", "-l", str(self.path))


def _run(*command: str) -> int:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode
    except OSError:
        return 1
