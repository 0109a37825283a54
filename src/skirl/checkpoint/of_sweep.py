"""What tells the folder of a sweep, in which each variant has a folder of checkpoints."""

import json
import os
from contextlib import suppress
from pathlib import Path

OF_SWEEP = "sweep-checkpoint.json"
"""The header of a sweep, in the folder that has a folder of checkpoints for each of its variants."""


def refuse_sweep(folder: Path) -> None:
    """Raise if the folder holds a sweep: a run is no part of it."""
    if (folder / OF_SWEEP).is_file():
        raise ValueError(
            f"save is {folder}, which holds a sweep: set it to another folder, or go on with a variant, {folder / 'NAME'}"
        )


def named_by_sweep(folder: Path) -> str | None:
    """Return the name of the header in this folder from which a sweep goes on with this variant; None if there is none."""
    own = Path(os.path.abspath(folder))
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return json.loads((own.parent / OF_SWEEP).read_bytes())["variants"].get(own.name)
    return None
