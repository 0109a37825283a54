"""The memory nodes that `skirl verify --nodes` starts on this machine."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

PATIENCE = 600.0
"""Seconds that a call may take: what is compared is bits, on machines however busy."""


@contextmanager
def started(counts: Sequence[int]) -> Iterator[list[str]]:
    """The addresses of some groups of nodes, one after the other, as stores; all end with the block.

    **Arguments**

    - `counts`: how many nodes each group has.

    >>> with started([]) as specs:
    ...     specs
    []
    """
    if not counts:
        yield []
        return
    from skirl.store.remote.started import StartedNodes

    os.environ.setdefault("SKIRL_PATIENCE", f"{PATIENCE:g}")  # of this process and those that it starts
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skirl-verify-nodes-")))
        specs = []
        for number, count in enumerate(counts):
            log = folder / str(number)
            log.mkdir()
            specs.append(stack.enter_context(StartedNodes(count, patience=PATIENCE, log=log)).spec)
        yield specs
