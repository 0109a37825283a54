"""The loop: a target, a seed, some seconds; what came of each case, and a folder for each that went wrong.

A target makes valid seeds once, writes a mutated input into a folder for each case, and judges what the library makes of
the folder. The judgement is "read" (and the result is right), "refused" (a documented error, in a sentence that names the
file), or an exception, which is a finding: another class of error, a wrong result, more than `MEMORY` beside what was held
before. A case that takes longer than `HANG` ends the process with the tracebacks of all threads, as a crash does; whoever
started it (`child.py`) finds the input in its folder, since it is written before it is judged.
"""

import faulthandler
import os
import re
import resource
import shutil
import time
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.mutate import Draw

HANG = 60
"""Seconds of a case, at most: hundreds of times what one takes, since others share the cores."""
MEMORY = 500 << 20
"""Bytes of address space that a case may add."""
MOST_FINDINGS = 20
WARM = 3
"""Cases before the seconds begin: they compile what the others use."""
READ, REFUSED = "read", "refused"


class Target:
    """One parser or loader."""

    name: str

    def prepare(self, folder: Path) -> None:
        """Make the valid seeds, and what a judgement compares with. The folder is the target's own."""

    def draw(self, draw: Draw, folder: Path) -> None:
        """Write one case into an empty folder."""
        raise NotImplementedError

    def judge(self, folder: Path) -> str:
        """READ or REFUSED; anything that is raised is a finding."""
        raise NotImplementedError


@dataclass
class Finding:
    """A case that went wrong."""

    target: str
    seed: int
    case: int
    what: str
    """The last line of its traceback."""
    where: str
    """The innermost line of the library in it; findings of one place are one."""
    folder: str
    text: str = field(repr=False, default="")

    def told(self) -> str:
        """As a test shows it."""
        again = f"python -m tests.fuzz {self.target} --seed {self.seed} --case {self.case}"
        return (
            f"{self.target}, seed {self.seed}, case {self.case}: {self.what}\n  at {self.where}\n  input: {self.folder}\n"
            f"  again: {again}\n  or:    python -m tests.fuzz {self.target} --input {self.folder}\n{self.text}"
        )


def clean(error: BaseException, folder: Path, *kinds: type[BaseException]) -> str:
    """REFUSED, if an error is of a documented class and its sentence names the file; else it is raised."""
    text = str(error)
    if not isinstance(error, kinds):
        raise error
    assert str(folder) in text, f"the error does not name its file: {type(error).__name__}: {text}"
    assert len(text) < 2000, f"an error of {len(text)} characters: {text[:200]}"
    return REFUSED


def draw_of(target: Target, seed: int, case: int) -> Draw:
    """What a case is drawn from: nothing but its target, its seed and its number."""
    return Draw((zlib.crc32(target.name.encode()) << 64) ^ (seed << 32) ^ case)


@contextmanager
def limited() -> Iterator[None]:
    """Little memory, and little time."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, before[1]))
    faulthandler.dump_traceback_later(HANG, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, before)


def judged(target: Target, folder: Path) -> str:
    """The judgement of one case."""
    with limited():
        return target.judge(folder)


def run(target: Target, seed: int, seconds: float, scratch: Path, findings: Path, first: int = 0) -> dict[str, Any]:
    """Cases from `first` on for so long; how many there were, and what went wrong."""
    counts: dict[str, Any] = {"target": target.name, "seed": seed, "cases": 0, READ: 0, REFUSED: 0, "findings": []}
    seen: set[str] = set()
    end = time.monotonic() + seconds
    case = first
    while time.monotonic() < end or case < first + WARM:
        folder = scratch / f"{target.name}-{seed}-{case}"
        folder.mkdir()
        kept = folder.with_name(folder.name + ".kept")  # a loader may change what it opens
        (scratch / "now").write_text(f"{target.name} {seed} {case} {folder}")
        try:
            with limited():
                target.draw(draw_of(target, seed, case), folder)
            shutil.copytree(folder, kept)
            counts[judged(target, folder)] += 1
        except Exception as error:
            finding = _finding(target, seed, case, error, findings)
            if finding.where not in seen:
                seen.add(finding.where)
                findings.mkdir(parents=True, exist_ok=True)
                shutil.copytree(kept if kept.exists() else folder, finding.folder, dirs_exist_ok=True)
                counts["findings"].append(finding)
        counts["cases"] += 1
        if counts["cases"] == WARM:
            end = time.monotonic() + seconds
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(kept, ignore_errors=True)
        case += 1
        if len(seen) >= MOST_FINDINGS:
            break
    counts["last"] = case - 1
    return counts


def _finding(target: Target, seed: int, case: int, error: Exception, findings: Path) -> Finding:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f"src{os.sep}skirl" in f.filename] or frames
    at = ours[-1]
    text = "".join(traceback.format_exception(error))
    what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    where = f"{Path(at.filename).name}:{at.lineno} in {at.name}, {type(error).__name__}"
    if isinstance(error, AssertionError):
        where += " " + re.sub(r"[\d']+", "", what)[:60]
    folder = findings / f"{target.name}-{seed}-{case}"
    return Finding(target.name, seed, case, what, where, str(folder), text[-3000:])
