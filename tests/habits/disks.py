"""A disk that can be full: a small file system of its own, where this process may mount one."""

import contextlib
import subprocess
from pathlib import Path

import pytest


class Disk:
    """A folder on 48 MB of its own; a test that needs it is skipped where none can be mounted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        if _run("mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(path)):
            pytest.skip("needs a file system of its own: run as root, where mounting is allowed")
        self._filler = path / "filler"

    def fill(self) -> None:
        """No byte is left."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 20)) == 1 << 20:
                pass
            while file.write(bytes(1 << 12)):
                pass

    def free(self) -> None:
        """There is room again."""
        self._filler.unlink()

    def make_read_only(self) -> None:
        """From here on nothing can be written; no file may be open for writing."""
        assert not _run("mount", "-o", "remount,ro", str(self.path))

    def make_writable(self) -> None:
        """It can be written to again."""
        assert not _run("mount", "-o", "remount,rw", str(self.path))

    def close(self) -> None:
        """Let it go, with all that it holds."""
        _run("umount", "-l", str(self.path))


def _run(*command: str) -> int:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode
    except OSError:
        return 1
