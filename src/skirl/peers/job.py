"""The trainers of this process's job: found by what torchrun or another launcher puts in the environment, joined when the
first embeddings are made, and left at its end."""

import atexit
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from skirl.peers.base import Alone, PeerError, Peers, missing
from skirl.peers.processes import LOOPBACK, die_with_launcher, leave_note
from skirl.tools.units import timeout_of

if TYPE_CHECKING:
    import torch

log = logging.getLogger("skirl")
BEGINNING = 60.0
"""Least number of seconds that trainers have to start: interpreters take long on a busy machine."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that name the network interface of gloo and of NCCL."""

_given: ContextVar[Peers | None] = ContextVar("skirl trainers", default=None)
_joining = threading.Lock()
_joined: list[Peers] = []


def trainers(device: str = "cpu", timeout: float | None = None) -> Peers:
    """Return the trainers of this job, joining them first if need be. Return `Alone` if no launcher started this process."""
    if (given := _given.get()) is not None:
        return given
    with _joining:
        if not _joined:
            _joined.append(join(device, timeout=timeout))
            if _joined[0].size > 1:
                atexit.register(_left)
                _tell_of_errors()
        return _joined[0]


@contextmanager
def using(peers: Peers) -> Iterator[None]:
    before = _given.set(peers)
    try:
        yield
    finally:
        _given.reset(before)


def fail(error: BaseException) -> None:
    """End the other trainers as well, because of an error that ends this process."""
    left, _joined[:] = list(_joined), [Alone()] if _joined else []
    steps = [peers.channels["rows"].step for peers in left if "rows" in peers.channels]
    leave_note(steps[0] if steps else None, isinstance(error, PeerError))
    for peers in left:
        with suppress(Exception):  # they may be gone already
            peers.fail(error)


def leave() -> None:
    """Leave the job when all other trainers do. Raise a PeerError if one of them is lost."""
    atexit.unregister(_left)
    for peers in _several():
        peers.close()


def _left() -> None:
    """Leave at the end of a process without an error. Ignore errors, because a trainer that failed has said so itself."""
    for peers in _several():
        with suppress(Exception):
            peers.close()


def _several() -> list[Peers]:
    return [peers for peers in _joined if peers.size > 1]


def _forget() -> None:
    """Forget, in a fork, that its parent was alone: trainers that torchrun forks find each other by their environment."""
    if not _several():
        _joined.clear()


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


class Launched(NamedTuple):
    """A launcher's description of this process: its rank, also among those of this machine, and where the store is."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """Read the variables of torchrun. Return None for a process that no launcher started, or for the only trainer."""
        if environment.get("WORLD_SIZE", "1").strip() == "1":
            return None

        def number(name: str, default: str = "") -> int:
            text = environment.get(name, default)
            if not text.strip().isdecimal():
                raise ValueError(
                    f"WORLD_SIZE is {environment['WORLD_SIZE']} and {name} is {text!r} in the environment: start trainers "
                    "with `skirl launch` or torchrun, which set both to whole numbers"
                )
            return int(text)

        address = environment.get("MASTER_ADDR") or LOOPBACK
        size, rank, port = number("WORLD_SIZE"), number("RANK"), number("MASTER_PORT")
        if rank >= size:
            raise ValueError(f"RANK is {rank} and WORLD_SIZE {size} in the environment: ranks are 0 to {size - 1}")
        return cls(rank, size, number("LOCAL_RANK", "0"), number("LOCAL_WORLD_SIZE", "1"), address, port)

    @property
    def one_machine(self) -> bool:
        return self.local_size == self.size


def join(device: "torch.device | str" = "cpu", *, timeout: float | None = None) -> Peers:
    """Wait for all trainers of this job, and return them. Return `Alone` in a process that no launcher started."""
    die_with_launcher()
    launched = Launched.of(os.environ)
    if launched is None:
        return Alone()
    timeout = timeout_of(os.environ) if timeout is None else timeout
    import torch
    import torch.distributed as dist

    from skirl.peers.groups import ProcessGroups

    device = torch.device(device)
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", _own_gpu(launched, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    if dist.is_initialized():  # by the program or by Lightning, which will also destroy it
        return ProcessGroups(dist.distributed_c10d._get_default_store(), device=device, timeout=timeout)
    if launched.one_machine and not any(os.environ.get(name) for name in INTERFACES):
        os.environ.update(dict.fromkeys(INTERFACES, "lo"))
    began, waits = time.monotonic(), timedelta(seconds=min(max(timeout, BEGINNING), 1e8))
    try:
        store = _store(launched, waits)
        _meet(store, launched, max(timeout, BEGINNING))
        dist.init_process_group("gloo", store=store, rank=launched.rank, world_size=launched.size, timeout=waits)
        return ProcessGroups(store, device=device, timeout=timeout, port=launched.port, leave=_destroy)
    except RuntimeError as error:
        if isinstance(error, PeerError):
            raise
        log.debug("trainers do not meet: %r", error)
        waited, where = time.monotonic() - began, f"{launched.address}:{launched.port}"
        raise PeerError(
            f"rank {launched.rank} waited {waited:.1f} s for the others at {where} and did not meet them: see the last "
            "lines that the others printed, and start the job again"
        ) from None


def _own_gpu(launched: Launched, gpus: int) -> int:
    if launched.local_size > gpus:  # NCCL cannot share one
        raise ValueError(f"{launched.local_size} trainers on a machine with {gpus} GPUs: start one for each GPU")
    return launched.local_rank % gpus


def _meet(store: Any, launched: Launched, timeout: float) -> None:
    began, left = time.monotonic(), [rank for rank in range(launched.size) if rank != launched.rank]
    store.set(f"there/{launched.rank}", "")
    while left := [rank for rank in left if not store.check([f"there/{rank}"])]:
        waited = time.monotonic() - began
        if waited > timeout:
            raise PeerError(missing(launched.rank, left, "the start of the job", waited, timeout))
        time.sleep(min(0.05, timeout / 20))


def _store(launched: Launched, waits: timedelta):
    """Open the store in which trainers find each other. If all are on one machine, no other machine can reach it."""
    from torch.distributed import PrefixStore, TCPStore

    own = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    serves = own and launched.rank == 0
    address, listening = launched.address, None
    if own and launched.one_machine:
        address = LOOPBACK
        if serves:
            listening = socket.create_server((LOOPBACK, launched.port), backlog=1024).detach()
    store = TCPStore(
        address, launched.port, launched.size, serves, waits, wait_for_workers=False, master_listen_fd=listening
    )
    # Each launcher counts its own restarts, so counts of two nodes may differ: a name that all share must not contain one.
    again = "" if own else f"/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return PrefixStore(f"skirl{again}", store)


def _destroy() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
