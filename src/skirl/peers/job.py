"""The trainers of the job that this process is one of: joined when the first embeddings are made, left at its end."""

import atexit
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType

from skirl.peers.alone import Alone
from skirl.peers.base import Peers
from skirl.peers.errors import PeerError
from skirl.peers.processes import watch_launcher

_given: ContextVar[Peers | None] = ContextVar("skirl trainers", default=None)
_joining = threading.Lock()
_joined: list[Peers] = []


def trainers(device: str = "cpu", patience: float | None = None) -> Peers:
    """The trainers of this job; `Alone` where no launcher has started this process.

    **Arguments**

    - `device`: where rows are.
    - `patience`: seconds that one waits for another, as `skirl.peers.start.join` takes them.
    """
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
    """Embeddings that are made in this block by this thread are those of a trainer among others.

    **Arguments**

    - `peers`: how it reaches them; `Alone()` for embeddings that are this process's own.
    """
    before = _given.set(peers)
    try:
        yield
    finally:
        _given.reset(before)


def fail(error: BaseException) -> None:
    """End the other trainers as well, by an error that this process ends with.

    **Arguments**

    - `error`: what happened.
    """
    left, _joined[:] = list(_joined), [Alone()] if _joined else []
    for peers in left:
        with suppress(Exception):  # they may be gone already
            peers.fail(error)


def leave(whole: bool = True) -> None:
    """The end of this process's part, when all others are at theirs; a PeerError where one of them is lost.

    **Arguments**

    - `whole`: it ends well, and so does its launcher then. One that will start trainers again is not watched: until it does,
      it waits as one does that is through.
    """
    atexit.unregister(_left)
    for peers in _several():
        peers.close()
        if whole:
            watch_launcher(peers.patience)


def _left() -> None:
    """Nothing went wrong, and the process ends well also where another one has failed: that has said so itself."""
    for peers in _several():
        with suppress(Exception):
            peers.close()
        watch_launcher(peers.patience)


def _several() -> list[Peers]:
    return [peers for peers in _joined if peers.size > 1]


def _tell_of_errors() -> None:
    """An exception that ends this process ends the others, with its words."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, PeerError):
            print(error, file=sys.stderr)  # where it happened is not in this process
        else:
            before(kind, error, trace)
        fail(error)

    sys.excepthook = hook
