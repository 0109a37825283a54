"""Memory nodes that `skirl verify --nodes` starts on this machine."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

PATIENCE = 600.0
"""Seconds that a call may take; long, so that a busy machine does not fail a comparison of bits."""


@contextmanager
def started(counts: Sequence[int]) -> Iterator[list[str]]:
    """Start groups of nodes and yield the address of each as a store. All end with the block.

    >>> with started([]) as specs:
    ...     specs
    []
    """
    if not counts:
        yield []
        return
    from skirl.store.remote.started import StartedNodes

    os.environ.setdefault("SKIRL_PATIENCE", f"{PATIENCE:g}")  # for this process and those that it starts
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skirl-verify-nodes-")))
        specs = []
        for number, count in enumerate(counts):
            log = folder / str(number)
            log.mkdir()
            specs.append(stack.enter_context(StartedNodes(count, patience=PATIENCE, log=log)).spec)
        yield specs
