"""What sweeps leave in their folders, and how they are killed."""

import json
import os
import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skirl.cli.files import Export


def standing(run: Path) -> dict[str, Any]:
    return json.loads((run / "standing.json").read_text())


def left_of(run: Path) -> list[tuple[int, str, str]]:
    """Return who left: when, who and why, in this order."""
    places = standing(run)["places"]
    return sorted((at["left"], at["variant"], at["state"]) for at in places if at["left"] is not None)


def rows_of(checkpoint: Path) -> pa.Table:
    """Return the rows of a checkpoint, in order."""
    out = (checkpoint.parent if checkpoint.is_file() else checkpoint) / "rows.parquet"
    Export(checkpoint, out, force=True).run()
    return pq.read_table(out).sort_by([("table", "ascending"), ("row", "ascending")])


def evaluations(run: Path) -> list[dict[str, Any]]:
    """The evaluations of a run, without times. Other lines count from the last one of the same start."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    kept = re.compile("kind|step|best_step|loss|(test_)?(auc|logloss|ne|samples)")
    lines = (line for line in lines if line["kind"] == "eval")
    return [{name: value for name, value in line.items() if kept.fullmatch(name)} for line in lines]


def left_behind(folder: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what does not depend on where and when: race, losses, scores, rows of those that did not diverge."""
    stayed = [name for name, of in result["by_variant"].items() if "diverged" not in (of["left"] or "")]
    own = {name: json.loads((folder / "run" / name / "result.json").read_text()) for name in result["by_variant"]}
    names = ("winner", "standing", "variant_steps", "cost", "seed_noise", "steps", "failed")
    return {
        "race": standing(folder / "run"),
        "by_variant": {n: of | {"run": None} for n, of in result["by_variant"].items()},
        "losses": {name: (of["loss"], of["auc"], of["steps"], of.get("test_auc")) for name, of in own.items()},
        "evaluations": {name: evaluations(folder / "run" / name) for name in own},
        "rows": {name: rows_of(folder / "saved" / name) for name in stayed},
        **{name: result[name] for name in names},
    }


def same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    different = [name for name in theirs if ours[name] != theirs[name]]
    assert not different, different


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_before(owner: Any, name: str, when: Callable[..., bool]) -> None:
    """From here on, this process is killed before a method is called, the first time that a condition holds."""
    method = getattr(owner, name)

    def killing(self: Any, *args: Any, **more: Any) -> Any:
        if when(self, *args):
            kill()
        return method(self, *args, **more)

    setattr(owner, name, killing)
