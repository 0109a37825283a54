"""The folder of a sweep, with a run folder for each variant."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from skirl.sweep.race import Race
from skirl.sweep.variants import Varied
from skirl.tools.machine import machine
from skirl.train.run_folder import Missing, new_folder, put_json

SWEEP, STANDING, RESULT = "sweep.json", "standing.json", "result.json"


class SweepFolder:
    """Writes the folder of a sweep. If its path is None, nothing is written.

    A file that cannot be written does not end the sweep: a warning says so, and `missing` lists it.
    """

    def __init__(self, where: str, name: str, *, resume: bool = False) -> None:
        self._missing = Missing()
        self._begun = False
        """Whether a step is trained."""
        self.path = None if where == "none" else new_folder(name) if where == "auto" else Path(where)
        if self.path is not None and self.path.exists() and not self.path.is_dir():
            raise ValueError(f"run is {self.path}, which is a file: set it to a folder")
        if self.path is not None and not resume and (self.path / SWEEP).exists():
            raise ValueError(
                f"run is {self.path}, which already holds a sweep: set run to another folder, or add --resume"
            )

    def begin(self, flags: Mapping[str, Any], variants: Sequence[Varied]) -> None:
        """Write the first file after the first steps: a sweep that is refused leaves nothing in the way of the next try."""
        self._begun = True
        of_variants = [{"name": variant.name, "overrides": dict(variant.overrides)} for variant in variants]
        started = datetime.now(UTC).isoformat(timespec="seconds")
        self._put(SWEEP, {"flags": dict(flags), "variants": of_variants, "started": started, "machine": machine()})

    def standing(self, race: Race) -> None:
        self._put(STANDING, {"step": race.step, "places": [asdict(place) for place in race.standing()]})

    @property
    def missing(self) -> list[str]:
        return self._missing.told()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result. One that is there stays if a resume found nothing left to train."""
        if self._begun or self.path is None or not (self.path / RESULT).is_file():
            self._put(RESULT, result)

    def _put(self, name: str, facts: Mapping[str, Any]) -> None:
        if self.path is not None:
            with self._missing.tried(name, self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                put_json(self.path / name, {"command": "sweep", **facts})
