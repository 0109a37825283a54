"""Save and load everything that a run needs to continue bit for bit as if it had never stopped: docs/checkpoints.md."""

from typing import TYPE_CHECKING

from skirl.tools import lazily

if TYPE_CHECKING:
    from skirl.checkpoint.folder import numbers
    from skirl.checkpoint.load_run import load
    from skirl.checkpoint.saving import Saving, save

__all__ = ["Saving", "load", "numbers", "save"]

__getattr__ = lazily(__name__)
