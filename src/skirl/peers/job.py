"""The trainers of this process's job, which are joined when the first embeddings are made, and left at its end."""

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType

from skirl.peers.base import Alone, PeerError, Peers
from skirl.peers.processes import watch_launcher

_given: ContextVar[Peers | None] = ContextVar("skirl trainers", default=None)
_joining = threading.Lock()
_joined: list[Peers] = []


def trainers(device: str = "cpu", patience: float | None = None) -> Peers:
    """Return the trainers of this job, joining them first if need be. Return `Alone` if no launcher started this process."""
    given = _given.get()
    if given is not None:
        return given
    with _joining:
        if not _joined:
            from skirl.peers.start import join

            _joined.append(join(device, patience=patience))
            if _joined[0].size > 1:
                atexit.register(_left)
                _tell_of_errors()
        return _joined[0]


@contextmanager
def using(peers: Peers) -> Iterator[None]:
    """Use these trainers for embeddings that this thread makes in the block."""
    before = _given.set(peers)
    try:
        yield
    finally:
        _given.reset(before)


def fail(error: BaseException) -> None:
    """End the other trainers as well, because of an error that ends this process."""
    left, _joined[:] = list(_joined), [Alone()] if _joined else []
    for peers in left:
        with suppress(Exception):  # they may be gone already
            peers.fail(error)


def leave(whole: bool = True) -> None:
    """Leave the job when all other trainers do. Raise a PeerError if one of them is lost.

    Where the job is `whole`, its launcher must end too and is watched; one that restarts trainers is not.
    """
    atexit.unregister(_left)
    for peers in _several():
        peers.close()
        if whole:
            watch_launcher(peers.patience)


def _left() -> None:
    """Leave at the end of a process without an error. Ignore errors, because a trainer that failed has said so itself."""
    for peers in _several():
        with suppress(Exception):
            peers.close()
        watch_launcher(peers.patience)


def _several() -> list[Peers]:
    return [peers for peers in _joined if peers.size > 1]


def _forget() -> None:
    """Forget, in a fork, that its parent was alone: trainers that torchrun forks find each other by their environment."""
    if not _several():
        _joined.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _tell_of_errors() -> None:
    """Have an exception that ends this process end the others, with its message."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, PeerError):
            print(error, file=sys.stderr)  # no traceback: the cause is in another process
        else:
            before(kind, error, trace)
        fail(error)

    sys.excepthook = hook
