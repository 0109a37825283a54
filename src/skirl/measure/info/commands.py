"""`skirl info`: its flags and its output."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional


@dataclass(frozen=True)
class Info:
    """Say what a file or a folder is: a checkpoint, a disk store, a vocabulary, a plan, data, predictions, a run."""

    path: Positional[Path]
    """The file or folder; nothing in it is changed or locked."""
    check: bool = False
    """Read a whole checkpoint and compare its checksums; without this, only sizes are checked."""
    json: bool = False
    """Print one line of JSON."""

    def run(self) -> dict[str, Any]:
        """Look at the path and return what was found."""
        from skirl.measure.info.look import look

        return {"command": "info", "path": str(self.path), **look(self.path, check=self.check)}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as text for a reader, by label."""
        from skirl.measure.info.text import as_text

        return as_text(result)
