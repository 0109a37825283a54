"""The memory nodes that `skirl verify --nodes` starts on this machine."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path


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

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skirl-verify-nodes-")))
        specs = []
        for number, count in enumerate(counts):
            log = folder / str(number)
            log.mkdir()
            specs.append(stack.enter_context(StartedNodes(count, log=log)).spec)
        yield specs
