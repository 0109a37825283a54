"""The few parts of PyTorch RPC that a store needs: join the group of a run, call with a time limit, leave.

No RRef, no distributed autograd. Only TCP, since torch's default transports poll, and read other processes' memory.
"""

import array
import fcntl
import logging
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from skirl.store.remote.wire import Address

log = logging.getLogger("skirl")

THREADS = 8
"""Number of calls that a process answers at once."""
INTERFACE = "TP_SOCKET_IFNAME"
"""Environment variable that names the network interface of PyTorch RPC."""
TRANSPORTS: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]}
"""Transports and channels of PyTorch RPC. Empty: its defaults, to measure them. Extra lanes cost a quarter more CPU time."""
_SCHEME = "skirl"
_meet_in: list[tuple[Any, int, int]] = []
"""The store in which this process's group is formed, and its rank there."""


class Failed(RuntimeError):
    """A call failed, or did not return in time."""


def join(store: Any, address: Address, name: str, rank: int, seconds: float) -> None:
    """Join the group of a run. The group may grow later, and joining waits for no other member."""
    from torch.distributed import rpc
    from torch.distributed.rendezvous import register_rendezvous_handler

    if rpc.api._is_current_rpc_agent_set():
        raise Failed("this process already uses PyTorch RPC, which rows on nodes need for themselves")
    if not os.environ.get(INTERFACE) and (found := _interface(address)) is not None:
        os.environ[INTERFACE] = found

    _meet_in[:] = [(store, rank, -1)]
    with suppress(RuntimeError):  # already registered
        register_rendezvous_handler(_SCHEME, lambda url, **more: iter(_meet_in))
    rpc._init_counter = 0  # part of the group's name; each group has a store of its own, so 0 will do
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"{_SCHEME}://",
        rpc_timeout=seconds,
        num_worker_threads=THREADS,
        **TRANSPORTS,
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
    """Begin to call a function of another member. `end` returns its result."""
    from torch.distributed import rpc

    try:
        return rpc.rpc_async(to, function, args, timeout=seconds)
    except RuntimeError as error:
        raise Failed(reason(error)) from None


def end(future: Any) -> Any:
    """Wait for a call that was begun, and return its result."""
    try:
        return future.wait()
    except RuntimeError as error:
        raise Failed(reason(error)) from None


def reason(error: BaseException) -> str:
    """Say why a call failed, in a few words.

    >>> reason(RuntimeError("RPCErr:1:RPC ran for more than set timeout (1000 ms) and will now be marked with an error"))
    'it did not answer in time'
    >>> reason(RuntimeError("ECONNRESET: connection reset by peer (this error originated at a.cc:1)"))
    'the connection broke: connection reset by peer'
    """
    text = str(error)
    if "set timeout" in text or "imeout" in text:
        return "it did not answer in time"
    code, colon, words = text.partition(": ")
    if colon and code.startswith("E") and code.isupper():
        return f"the connection broke: {words.partition(' (')[0]}"
    if "pipe closed" in text or "could not find destination" in text:
        return "it has left"
    return text.splitlines()[0][:200] if text else type(error).__name__


def timed_out(error: Failed) -> bool:
    """Return whether the call timed out, so that the other member may still be alive."""
    return str(error) == "it did not answer in time"


def _interface(address: Address) -> str | None:
    """Return the name of this machine's network interface towards the meeting point, or None if it is not known."""
    query = 0x8915  # SIOCGIFADDR, the address of an interface, on Linux
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as to:
        to.connect((address.host, address.port))
        mine = to.getsockname()[0]
        for _, name in socket.if_nameindex():
            asked = array.array("B", struct.pack("256s", name.encode()[:15]))
            with suppress(OSError):
                fcntl.ioctl(to, query, asked)
                if socket.inet_ntoa(asked.tobytes()[20:24]) == mine:
                    return name
    return None
