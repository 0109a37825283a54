"""`skirl info`: its flags, and what it prints."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional


@dataclass(frozen=True)
class Info:
    """Say what a file or a folder is: a checkpoint, a disk store, a vocabulary, data, predictions, a run."""

    path: Positional[Path]
    """The file or folder; nothing in it is changed or locked."""
    check: bool = False
    """Read all of a checkpoint and compare its checksums; without it, only sizes are checked."""
    json: bool = False
    """Print one line of JSON."""

    def run(self) -> dict[str, Any]:
        """Look."""
        from skirl.measure.info.look import look

        return {"command": "info", "path": str(self.path), **look(self.path, check=self.check)}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """The result as people read it."""
        from skirl.measure.info.text import as_text

        return as_text(result)
