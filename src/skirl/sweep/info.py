"""`skirl info`, which knows sweeps too: the folder of a sweep's checkpoints, and that of its runs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skirl.measure.info.commands import Info as InfoOfOthers
from skirl.sweep.names import HEADER, RESULT, SWEEP
from skirl.tools.sealed_json import CheckpointError


@dataclass(frozen=True)
class Info(InfoOfOthers):
    """Say what a file or folder is: a checkpoint, a disk store, a vocabulary, a plan, data, predictions, a run, a sweep."""

    def run(self) -> dict[str, Any]:
        """Look at the path and return what was found."""
        folder = self.path.parent if self.path.name in (HEADER, SWEEP) else self.path
        if (folder / HEADER).is_file():
            found = _of_checkpoint(folder, check=self.check)
        elif (folder / SWEEP).is_file():
            found = _of_runs(folder)
        else:
            return super().run()
        from skirl.measure.info.look import made

        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        return {"command": "info", "path": str(self.path), "failed": None, "made": made(folder), "bytes": size, **found}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as text for a reader, by label."""
        lines = super().summary(result)
        if "variants" in result:
            lines["variants"] = "\n".join(f"{name}: {of}" for name, of in result["variants"].items())
        if result.get("winner"):
            lines["winner"] = result["winner"]
        return lines


def _of_checkpoint(folder: Path, *, check: bool) -> dict[str, Any]:
    """Describe a sweep's checkpoint, and look whether that of each variant is whole."""
    from skirl.checkpoint.best import headers_with_steps
    from skirl.measure.info.checkpoint import describe
    from skirl.sweep.checkpoint import header_at

    header = header_at(folder)
    found, wrong = {}, None
    for name, file in header["variants"].items():
        try:
            failed = describe(folder / name / file, check=check)["failed"]
        except CheckpointError as error:
            failed = str(error)
        found[name], wrong = "damaged" if failed else "in the race", wrong or failed
    for name, why in header["left"].items():
        saved = headers_with_steps(folder / name)
        found[name] = f"{why}, " + (f"saved at step {saved[0][0]:,}" if saved else "not saved")
    return {
        "kind": "checkpoint of a sweep",
        "step": header["step"],
        "skirl": header["skirl"],
        "variants": found,
        "whole": wrong is None,
        "checked": "checksums" if check else "sizes",
        "failed": wrong,
    }


def _of_runs(folder: Path) -> dict[str, Any]:
    """Describe the folder of a sweep, with a run folder for each variant."""
    try:
        sweep = json.loads((folder / SWEEP).read_bytes())
        result: Mapping[str, Any] = json.loads((folder / RESULT).read_bytes()) if (folder / RESULT).is_file() else {}
        left = {name: of.get("left") or "trained to the end" for name, of in result.get("by_variant", {}).items()}
        return {
            "kind": "folder of a sweep",
            "made": sweep["started"],
            "data": sweep["flags"].get("data"),
            "step": result.get("steps"),
            "finished": bool(result) and result.get("stopped_by") is None,
            "variants": {v["name"]: left.get(v["name"], "still trained, or stopped") for v in sweep["variants"]},
            "winner": result.get("winner"),
            "failed": result.get("failed"),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder} is the folder of a sweep with a damaged file ({error!r}): look at the folders of its variants"
        ) from None
