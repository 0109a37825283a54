"""What trainers and memory nodes share without torch: addresses, and errors that travel."""

import errno
import os
import re
from dataclasses import dataclass
from typing import Any

from skirl.store.disk.os_files import DiskError, DiskFull
from skirl.tools.sealed_json import CheckpointError

_SPEC = re.compile(
    r"rpc://(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})(/rank-(?P<owner>[0-9]{1,9}))?"
)


@dataclass(frozen=True)
class Address:
    """The address of a meeting point, as seen by one owner."""

    host: str
    port: int
    owner: int = 0

    @classmethod
    def parse(cls, spec: str) -> "Address":
        match = _SPEC.fullmatch(spec)
        if match is None or not 0 < int(match["port"]) < 1 << 16:
            raise ValueError(f"store is {spec!r}: write it rpc://HOST:PORT, such as rpc://127.0.0.1:29400")
        return cls(match["host"].strip("[]"), int(match["port"]), int(match["owner"] or 0))

    @classmethod
    def meeting(cls, text: str) -> "Address":
        try:
            return cls.parse(f"rpc://{text}")
        except ValueError:
            raise ValueError(f"meet is {text!r}: write it HOST:PORT, such as 127.0.0.1:29400") from None

    @property
    def loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def hush() -> None:
    """Keep PyTorch from printing a warning for each connection that ends. It has to be called before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


class NodeError(RuntimeError):
    """A memory node does not answer, or refuses a call. The message names the node and says what to do."""


Said = tuple[str, str, int | None]
"""The kind of an error, its message, and its errno."""
_KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (CheckpointError, DiskError, DiskFull, OSError, ValueError, TypeError, NodeError)
}


def said(error: BaseException) -> Said:
    """Encode an error of a node for its owner."""
    kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "")
    words = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    return kind or "NodeError", words if kind else repr(error), getattr(error, "errno", None)


def raised(text: Any, node: str) -> Exception:
    """Return the exception for an error that a node reported. It names the node if it is of the node."""
    kind, words, number = text
    if kind in ("CheckpointError", "DiskError", "ValueError", "TypeError"):
        return _KINDS[kind](words)
    words = f"{node}: {words}"
    if kind == "OSError" and number is not None:
        return OSError(number, words)
    return DiskFull(words, number or errno.ENOSPC) if kind == "DiskFull" else _KINDS.get(kind, NodeError)(words)
