"""What travels between a trainer and a memory node: addresses, packed arrays, calls and errors."""

import os
import pickle
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from skirl.store.disk.os_files import DiskError, DiskFull
from skirl.tools.sealed_json import CheckpointError

_SPEC = re.compile(
    r"rpc://(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})(/rank-(?P<owner>[0-9]{1,9}))?"
)


@dataclass(frozen=True)
class Address:
    """The address of a meeting point, as seen by one owner.

    >>> Address.parse("rpc://10.0.0.5:29400/rank-3")
    Address(host='10.0.0.5', port=29400, owner=3)
    >>> Address.meeting("somewhere")
    Traceback (most recent call last):
    ValueError: meet is 'somewhere': write it HOST:PORT, such as 127.0.0.1:29400
    """

    host: str
    port: int
    owner: int = 0

    @classmethod
    def parse(cls, spec: str) -> "Address":
        """Parse the name of a store: rpc://HOST:PORT or rpc://HOST:PORT/rank-N."""
        match = _SPEC.fullmatch(spec)
        if match is None or not 0 < int(match["port"]) < 1 << 16:
            raise ValueError(f"store is {spec!r}: write it rpc://HOST:PORT, such as rpc://127.0.0.1:29400")
        return cls(match["host"].strip("[]"), int(match["port"]), int(match["owner"] or 0))

    @classmethod
    def meeting(cls, text: str) -> "Address":
        """Parse the value of `--meet`: HOST:PORT."""
        try:
            return cls.parse(f"rpc://{text}")
        except ValueError:
            raise ValueError(f"meet is {text!r}: write it HOST:PORT, such as 127.0.0.1:29400") from None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def hush() -> None:
    """Keep PyTorch from printing a warning for each connection that ends. It has to be called before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


_GROUP = {
    ("torch.distributed.rpc.internal", "PythonUDF"),
    ("torch.distributed.rpc.internal", "RemoteException"),
    ("torch.distributed.rpc._utils", "_update_group_membership"),
    ("torch.distributed.rpc.backend_registry", "_get_device_infos"),
    ("torch._C._distributed_rpc", "WorkerInfo"),
    ("torch", "device"),
}
"""Names that members of a group use when one joins."""


def only(functions: Iterable[Callable[..., Any]]) -> None:
    """Let other processes call only these functions in this one, and those that are needed to join a group."""
    from torch.distributed.rpc import internal

    allowed = {(f.__module__, f.__qualname__): f for f in functions}
    tensor = internal._InternalRPCPickler._tensor_receiver

    class KnownNames(pickle.Unpickler):
        """An unpickler that refuses every other name."""

        def find_class(self, module: str, name: str, /) -> Any:
            if (module, name) in allowed:
                return allowed[module, name]
            if (module, name) in _GROUP:
                return super().find_class(module, name)
            if (module, name) == ("torch.distributed.rpc.internal", "_InternalRPCPickler"):
                return _PICKLER
            if (module, name) == ("builtins", "getattr"):
                return lambda of, attribute: tensor if (of, attribute) == (_PICKLER, "_tensor_receiver") else None
            raise AttributeError(f"{module}.{name} is called by name: a node calls nothing but its store's functions")

    internal._unpickler = KnownNames


_PICKLER = "what makes tensors of a call"


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


class NumberedCalls:
    """The owner's side: it tracks which puts have begun and which are acknowledged.

    >>> puts = NumberedCalls()
    >>> a, b = puts.begin(), puts.begin()
    >>> puts.done(b[0])
    >>> a, b, puts.begin()
    ((1, 1), (2, 1), (3, 1))
    >>> puts.done(1), puts.begin()
    (None, (4, 3))
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._open: set[int] = set()

    def begin(self) -> tuple[int, int]:
        """Return a new number, and the smallest one that is not acknowledged."""
        with self._lock:
            self._last += 1
            self._open.add(self._last)
            return self._last, min(self._open)

    def done(self, number: int) -> None:
        """Note that a put is acknowledged."""
        with self._lock:
            self._open.discard(number)


class Taken:
    """The part's side: it takes each put once. Those in flight may come in any order.

    >>> taken = Taken(run=7)
    >>> taken.take(7, 2, 1), taken.take(7, 1, 1), taken.take(7, 3, 3)
    (None, None, None)
    >>> taken.take(7, 2, 1)
    Traceback (most recent call last):
    ValueError: put 2 of run 7 comes late: it was taken before, and newer rows may stand in its place
    >>> taken.take(6, 9, 9)
    Traceback (most recent call last):
    ValueError: put 9 is of run 6, and this part belongs to run 7: end the older one
    """

    def __init__(self, run: int) -> None:
        self._lock = threading.Lock()
        self._run = run
        self._settled = 1
        self._begun: set[int] = set()

    def take(self, run: int, number: int, settled: int) -> None:
        """Accept a put, or raise a ValueError if it must not change anything."""
        with self._lock:
            if run != self._run:
                raise ValueError(
                    f"put {number} is of run {run}, and this part belongs to run {self._run}: end the older one"
                )
            if number < self._settled or number in self._begun:
                raise ValueError(
                    f"put {number} of run {run} comes late: it was taken before, and newer rows may stand in its place"
                )
            if settled > self._settled:
                self._settled = settled
                self._begun = {begun for begun in self._begun if begun >= settled}
            self._begun.add(number)
