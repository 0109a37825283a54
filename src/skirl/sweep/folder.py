"""What a sweep writes: its folder, with a run folder for each variant; and when it is saved, and the best of each."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from skirl.checkpoint import folder
from skirl.checkpoint.saving import Saving
from skirl.sweep.checkpoint import Parts, confirm, names_of, write_header
from skirl.sweep.race import Judged, Race
from skirl.sweep.ranks import Ranks
from skirl.sweep.sweep import Sweep
from skirl.sweep.variants import KeepFlags, Varied
from skirl.tools.machine import machine
from skirl.tools.os_errors import NotWritten, why
from skirl.tools.sealed_json import put_whole
from skirl.train.flags import RUNS
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
        self._begun_at = 0
        if where == "none":
            return
        self.path = new_folder(Path(os.environ.get(RUNS) or "runs"), name) if where == "auto" else Path(where)
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"run is {self.path}, which is a file: set it to a folder")
        if where != "auto" and not resume and (self.path / SWEEP).exists():
            raise ValueError(
                f"run is {self.path}, which already holds a sweep: set run to another folder, or add --resume"
            )

    def close(self) -> None:
        if self._race is not None:
            self._race.close()

    def forget(self) -> None:
        """Leave the folder of a sweep that failed at once to the next try."""
        if self._race is not None and self.path is not None:
            with suppress(OSError):
                (self.path / SWEEP).unlink(missing_ok=True)
                (self.path / RACE).unlink(missing_ok=True)

    @property
    def name(self) -> str | None:
        return None if self.path is None else str(self.path)

    def of(self, variant: str) -> str:
        return "none" if self.path is None else str(self.path / variant)

    def begin(self, flags: Mapping[str, Any], variants: Sequence[Varied], step: int) -> None:
        """Write sweep.json and begin race.jsonl; one that resumes drops the lines after its step."""
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

    def standing(self, seconds: float, race: Race, aucs: Mapping[str, float | None]) -> None:
        at = [asdict(place) | {"auc": aucs.get(place.variant)} for place in race.standing()]
        when = {"step": race.step, "seconds": seconds, "begun_at": self._begun_at}
        if self._race is not None and self.path is not None:
            with self._missing.tried(RACE, self.path, race.step):
                self._race.write({**when, "places": at})

    @property
    def missing(self) -> list[str]:
        return self._missing.told()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result. One that is there stays if a resume found nothing left to train."""
        if self.path is not None and not (self._begun_at == result["steps"] and (self.path / RESULT).is_file()):
            with self._missing.tried(RESULT, self.path):
                put_json(self.path / RESULT, result)


log = logging.getLogger("skirl")


class SweepKeeper:
    """Saves a sweep on all ranks: its header, which the first rank writes, makes a checkpoint count.

    If one cannot be written, a warning says so, the one before still counts, and the next one is tried all the same.
    """

    def __init__(self, ranks: Ranks, keeping: KeepFlags, sweep: Sweep, parts: Parts) -> None:
        self._ranks, self._path, self._sweep, self._parts = ranks, keeping.save, sweep, parts
        self.step: int | None = None
        """Of the checkpoint that counts."""
        self.failed: str | None = None
        self._names = [variant.name for variant in sweep.variants] if keeping.keep_best else []
        self._best_at: dict[str, int] = {}
        """By variant: the step of the best checkpoint, which is kept."""
        for name in self._names:
            if not keeping.resume:
                folder.refuse_checkpoints(self._folder(name))
            elif there := folder.headers_with_steps(self._folder(name)):
                self._best_at[name] = there[0][0]

    def save(self, header: dict[str, Any]) -> None:
        path, savings = self._path, dict[str, Saving]()
        assert path is not None

        def write() -> dict[str, str]:
            savings.update(self._sweep.saved(path, self._parts) if self._sweep.racing else {})
            return names_of(savings)

        try:
            names = self._ranks.written(write, "a checkpoint is on disk")
            header = header | {"variants": {name: of for one in names for name, of in one.items()}}
            self._ranks.written(lambda: write_header(path, header) if self._ranks.first else None, "its header")
        except NotWritten as error:
            self.failed = f"step {header['step']:,} is not saved: {error}"
            log.warning("%s. Training goes on, and the next checkpoint is tried all the same", self.failed)
            return
        self.failed = None
        self.counts(header)
        confirm(savings)

    def counts(self, header: Mapping[str, Any]) -> None:
        """Take note that this checkpoint counts, and keep the best: after a kill, that may not have been done."""
        self.step = header["step"]
        self.keep_best(header)

    # The best of each variant.

    def _due(self, header: Mapping[str, Any]) -> list[str]:
        """Return the variants of this rank that were never better than in this checkpoint, which is not kept yet."""
        judged, step = header["also"]["race"]["judged"], header["step"]
        due = [name for name in self._names if name in judged and Judged(*judged[name]).is_best_at(step)]
        return [name for name in due if self._best_at.get(name) != step]

    def keep_best(self, header: Mapping[str, Any]) -> None:
        """Keep checkpoints that are on disk."""
        step, saved = header["step"], header["variants"]
        for name in self._due(header):
            if name not in saved:
                continue
            try:
                folder.keep_best(self._folder(name).parent / saved[name])
            except (OSError, ValueError) as error:
                log.warning("step %d, the best of variant %s so far, could not be kept: %s", step, name, why(error))
            else:
                self._best_at[name] = step

    def best(self, name: str, judged: Judged | None) -> dict[str, Any] | None:
        """Return where a variant's best checkpoint is: folder, step, held-out log loss. None if none is kept."""
        if name not in self._best_at:
            return None
        loss = judged.best if judged is not None and judged.best_step == self._best_at[name] else None
        return {"folder": str(self._folder(name)), "step": self._best_at[name], "test_logloss": loss}

    def _folder(self, name: str) -> Path:
        assert self._path is not None
        return self._path / name / folder.BEST
