"""The folder of a sweep, with a run folder for each variant."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from skirl.sweep.race import Race
from skirl.sweep.variants import Varied
from skirl.tools.machine import machine
from skirl.tools.sealed_json import put_whole
from skirl.train.run_folder import Lines, Missing, new_folder, put_json

SWEEP, RACE, RESULT = "sweep.json", "race.jsonl", "result.json"


class SweepFolder:
    """Writes the folder of a sweep. If its path is None, nothing is written.

    A file that cannot be written does not end the sweep: a warning says so, and `missing` lists it.
    """

    def __init__(self, where: str, name: str, *, resume: bool = False) -> None:
        self.path: Path | None = None
        self._race: Lines | None = None
        self._missing = Missing()
        self._begun_at: int | None = None
        """None until a step is trained."""
        if where == "none":
            return
        self.path = new_folder(name) if where == "auto" else Path(where)
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"run is {self.path}, which is a file: set it to a folder")
        if where != "auto" and not resume and (self.path / SWEEP).exists():
            raise ValueError(
                f"run is {self.path}, which already holds a sweep: set run to another folder, or add --resume"
            )

    def close(self) -> None:
        if self._race is not None:
            self._race.close()

    @property
    def name(self) -> str | None:
        return None if self.path is None else str(self.path)

    def begin(self, flags: Mapping[str, Any], variants: Sequence[Varied], step: int) -> None:
        """Write sweep.json and begin race.jsonl, after the first steps: a sweep that is refused leaves nothing in the way
        of the next try. One that resumes drops the lines after its step."""
        if self.path is None:
            return
        self._begun_at = step
        facts = {
            "command": "sweep",
            "flags": dict(flags),
            "variants": [{"name": variant.name, "overrides": dict(variant.overrides)} for variant in variants],
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine() | {"threads": flags.get("threads")},
        }
        with self._missing.tried(SWEEP, self.path, of=OSError):
            self.path.mkdir(parents=True, exist_ok=True)
            put_json(self.path / SWEEP, facts)
        with self._missing.tried(RACE, self.path, of=OSError):
            lines = (self.path / RACE).read_bytes().splitlines() if step and (self.path / RACE).is_file() else []
            kept = [line for line in lines if line.endswith(b"}") and json.loads(line)["step"] <= step]
            put_whole(self.path / RACE, b"".join(line + b"\n" for line in kept), "new")
            self._race = Lines(self.path / RACE)

    def standing(self, seconds: float, race: Race) -> None:
        line = {
            "step": race.step,
            "seconds": seconds,
            "begun_at": self._begun_at,
            "places": [asdict(place) for place in race.standing()],
        }
        if self._race is not None and self.path is not None:
            with self._missing.tried(RACE, self.path, race.step):
                self._race.write(line)

    @property
    def missing(self) -> list[str]:
        return self._missing.told()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result. One that is there stays if a resume found nothing left to train."""
        if self.path is not None and not (self._begun_at is None and (self.path / RESULT).is_file()):
            with self._missing.tried(RESULT, self.path):
                if self._begun_at is None:
                    self.path.mkdir(parents=True, exist_ok=True)
                put_json(self.path / RESULT, result)
