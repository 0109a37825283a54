"""Errors between an owner and its nodes, and the form in which a node's errors travel to the owner."""

from typing import Any

from skirl.store.disk.errors import DiskError, DiskFull
from skirl.tools.sealed_json import CheckpointError

Said = tuple[str, str, int | None]
"""The kind of an error, its message, and its errno."""

_KINDS: dict[str, type[Exception]] = {
    "CheckpointError": CheckpointError,
    "DiskError": DiskError,
    "ValueError": ValueError,
    "TypeError": TypeError,
}


class NodeError(RuntimeError):
    """A memory node does not answer, or refuses a call. The message names the node and says what to do."""


def said(error: BaseException) -> Said:
    """Encode an error of a node for its owner.

    >>> said(CheckpointError("a is damaged: use another checkpoint"))
    ('CheckpointError', 'a is damaged: use another checkpoint', None)
    """
    if isinstance(error, DiskFull):
        return "DiskFull", str(error), error.errno
    if isinstance(error, OSError):
        return "OSError", str(error) if error.errno is None else str(error.strerror or error), error.errno
    kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "NodeError")
    return kind, str(error) if kind != "NodeError" or isinstance(error, NodeError) else repr(error), None


def raised(text: Any, node: str) -> Exception:
    """Return the exception for an error that a node reported. Unless it is one of `_KINDS`, its message names the node."""
    kind, words, number = text
    if kind == "DiskFull":
        return DiskFull(f"{node}: {words}", number)
    if kind == "OSError":
        return OSError(number, f"{node}: {words}") if number is not None else OSError(f"{node}: {words}")
    if kind in _KINDS:
        return _KINDS[kind](words)
    return NodeError(f"{node}: {words}")
