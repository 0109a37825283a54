"""The fuzzing loop: a target, a seed and some seconds give the result of each case, and a folder for each that went wrong.

A target makes valid seeds once, writes a mutated input into a folder for each case, and judges what the library makes
of it. The judgement is "read" (with the right result), "refused" (a documented error, in a sentence that names the
file), or an exception, which is a finding: another class of error, a wrong result, or more than `MEMORY` on top of what
was held before. A case that takes longer than `HANG` ends the process with the tracebacks of all threads, as a crash
does. Whoever started it (`test_fuzz.py`) finds the input in its folder, because it is written before it is judged.
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
"""Most seconds of a case: hundreds of times the usual, because others share the cores."""
MEMORY = 500 << 20
"""Bytes of address space that a case may add."""
MOST_FINDINGS = 20
WARM = 3
"""Cases that run before the time starts: they compile what the others use."""
READ, REFUSED = "read", "refused"


class Target:
    """One parser or loader."""

    name: str

    def prepare(self, folder: Path) -> None:
        """Make the valid seeds, and what a judgement compares with. The target may keep files in the folder."""

    def draw(self, draw: Draw, folder: Path) -> None:
        """Write one case into an empty folder."""
        raise NotImplementedError

    def judge(self, folder: Path) -> str:
        """Return READ or REFUSED. Anything raised is a finding."""
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
    """The innermost line of the library in it. Findings with the same place count as one."""
    folder: str
    text: str = field(repr=False, default="")

    def told(self) -> str:
        """Return the finding as a test shows it."""
        again = f"python -m tests.fuzz {self.target} --seed {self.seed} --case {self.case}"
        return (
            f"{self.target}, seed {self.seed}, case {self.case}: {self.what}\n  at {self.where}\n  input: {self.folder}\n"
            f"  again: {again}\n  or:    python -m tests.fuzz {self.target} --input {self.folder}\n{self.text}"
        )


def clean(error: BaseException, folder: Path, *kinds: type[BaseException]) -> str:
    """Return REFUSED if an error is of a documented class and names the file. Raise it otherwise."""
    text = str(error)
    if not isinstance(error, kinds):
        raise error
    assert str(folder) in text, f"the error does not name its file: {type(error).__name__}: {text}"
    assert len(text) < 2000, f"an error of {len(text)} characters: {text[:200]}"
    return REFUSED


def draw_of(target: Target, seed: int, case: int) -> Draw:
    """Return the random draws of a case, which depend only on its target, seed and number."""
    return Draw((zlib.crc32(target.name.encode()) << 64) ^ (seed << 32) ^ case)


@contextmanager
def limited() -> Iterator[None]:
    """Limit memory and time inside the block."""
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
    """Return the judgement of one case, under the limits."""
    with limited():
        return target.judge(folder)


def run(target: Target, seed: int, seconds: float, scratch: Path, findings: Path) -> dict[str, Any]:
    """Run cases for some seconds. Return how many there were, and what went wrong."""
    counts: dict[str, Any] = {"target": target.name, "seed": seed, READ: 0, REFUSED: 0, "findings": []}
    seen: set[str] = set()
    end = time.monotonic() + seconds
    case = 0
    while time.monotonic() < end or case < WARM:
        folder = scratch / f"{target.name}-{seed}-{case}"
        folder.mkdir()
        kept = folder.with_name(folder.name + ".kept")  # a loader may change the files that it opens
        (scratch / "now").write_text(str(folder))
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
        case += 1
        counts["cases"] = case
        if case == WARM:
            end = time.monotonic() + seconds
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(kept, ignore_errors=True)
        if len(seen) >= MOST_FINDINGS:
            break
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
