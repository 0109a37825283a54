"""PyTorch RPC as far as a store needs it, over TCP only, since torch's default transports poll and read others' memory.

Its private names stand nowhere else; they are so in torch 2.6 to 2.13.
"""

import array
import errno
import fcntl
import os
import pickle
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from skirl.store.disk.os_files import DiskError, DiskFull
from skirl.store.remote.meeting import Address, NodeError
from skirl.tools.sealed_json import CheckpointError

THREADS = 8
"""Number of calls that a process answers at once."""
INTERFACE = "TP_SOCKET_IFNAME"
_MEMBERS = {
    ("torch.distributed.rpc.internal", "PythonUDF"),
    ("torch.distributed.rpc.internal", "RemoteException"),
    ("torch.distributed.rpc._utils", "_update_group_membership"),
    ("torch.distributed.rpc.backend_registry", "_get_device_infos"),
    ("torch._C._distributed_rpc", "WorkerInfo"),
    ("torch", "device"),
}
"""Names that members of a group use when one joins."""
_SCHEME = "skirl"
_meet_in: list[tuple[Any, int, int]] = []
"""The store in which this process's group is formed, and its rank there."""


FOREVER = 0.0
"""Seconds for a call without a time limit."""
LATE = "it did not answer in time"
"""Text of a `Failed` after which the other member may still be alive."""


class Failed(RuntimeError):
    """A call failed, or did not return in time."""


def join(store: Any, address: Address, name: str, rank: int, seconds: float) -> None:
    """Join the group of a run. The group may grow later, and joining waits for no other member."""
    from torch.distributed import rpc
    from torch.distributed.rendezvous import register_rendezvous_handler

    if rpc.api._is_current_rpc_agent_set():
        raise Failed("this process already uses PyTorch RPC, which rows on nodes need for themselves")
    if not os.environ.get(INTERFACE) and (name_here := _interface(address)) is not None:
        os.environ[INTERFACE] = name_here

    _meet_in[:] = [(store, rank, -1)]
    with suppress(RuntimeError):  # already registered
        register_rendezvous_handler(_SCHEME, lambda url, **more: iter(_meet_in))
    rpc._init_counter = 0  # part of the group's name; each group has a store of its own, so 0 will do
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"{_SCHEME}://",
        rpc_timeout=seconds,
        num_worker_threads=THREADS,
        _transports=["uv"],
        _channels=["basic"],  # more lanes cost a quarter more CPU time
    )
    try:
        rpc.init_rpc(name, rank=rank, world_size=None, rpc_backend_options=options)
    except RuntimeError as error:
        leave()
        raise Failed(reason(error)) from None


def leave() -> None:
    """Leave the group without waiting for the others."""
    from torch.distributed import rpc

    if rpc.api._is_current_rpc_agent_set():
        with suppress(RuntimeError):
            rpc.shutdown(graceful=False)


def begin(to: str, function: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> Any:
    from torch.distributed import rpc

    try:
        return rpc.rpc_async(to, function, args, timeout=seconds)
    except RuntimeError as error:
        raise Failed(reason(error)) from None


def end(future: Any) -> Any:
    try:
        return future.wait()
    except RuntimeError as error:
        raise Failed(reason(error)) from None


def reason(error: BaseException) -> str:
    text = str(error)
    return LATE if "imeout" in text else text.splitlines()[0][:200] if text else type(error).__name__


def only(functions: Iterable[Callable[..., Any]]) -> None:
    """Let other processes call only these functions in this one, and those that are needed to join a group."""
    from torch.distributed.rpc import internal

    allowed = {(f.__module__, f.__qualname__): f for f in functions}
    tensor = internal._InternalRPCPickler._tensor_receiver

    class KnownNames(pickle.Unpickler):
        def find_class(self, module: str, name: str, /) -> Any:
            if (module, name) in allowed:
                return allowed[module, name]
            if (module, name) in _MEMBERS:
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


def _interface(address: Address) -> str | None:
    """Return the name of this machine's network interface towards the meeting point, or None if it is not known."""
    query = 0x8915  # SIOCGIFADDR, the address of an interface, on Linux
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as to:
        to.connect((address.host, address.port))
        address_here = to.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name.encode()[:15]))
            with suppress(OSError):
                fcntl.ioctl(to, query, request)
                if socket.inet_ntoa(request.tobytes()[20:24]) == address_here:
                    return name
    return None
