"""What a fuzz target is: it writes a mutated input into a folder, and judges what the library makes of it.

A case is "read", with the right result, or "refused": a documented error in a sentence that names the file. Anything
else is a finding: another class of error, a wrong result, more than `MEMORY` on top of what was held before, or a hang.
"""

import faulthandler
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fuzz.mutate import Draw

HANG = 60
"""Most seconds of a case: hundreds of times the usual, because others share the cores."""
MEMORY = 500 << 20
"""Bytes of address space that a case may add."""
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


def clean(error: BaseException, folder: Path, *kinds: type[BaseException]) -> str:
    """Return REFUSED if an error is of a documented class and names the file. Raise it otherwise."""
    text = str(error)
    if not isinstance(error, kinds):
        raise error
    assert str(folder) in text, f"the error does not name its file: {type(error).__name__}: {text}"
    assert len(text) < 2000, f"an error of {len(text)} characters: {text[:200]}"
    return REFUSED


@contextmanager
def limited() -> Iterator[None]:
    """Limit memory and time inside the block. A hang ends the process, with the tracebacks of all threads."""
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
