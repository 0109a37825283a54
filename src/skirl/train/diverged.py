"""The message for a run whose loss is no longer finite."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skirl.checkpoint.best import headers_with_steps


def sentence(step: int, what: str, folder: Path | None, kept: Mapping[str, Any]) -> str:
    """Say why the run stopped, what to try, and which checkpoint to go on from."""
    then = "start over"
    saved = [] if folder is None or kept["newest"] is None else headers_with_steps(folder)
    sound = [each for each in saved if each[0] < step - 1]  # a state whose next loss is not finite is useless, too
    if sound:
        late = ", ".join(str(header) for at, header in saved if at >= step - 1)
        then += f", or go on from step {sound[0][0]:,} in {folder} with --resume"
        then += f" once {late} is removed, which is as broken" if late else ""
    return (
        f"{what} at step {step:,}, for the first time, so training stopped there: "
        f"set --lr and --dense-lr lower, or --warmup higher, and {then}"
    )
