"""Trainers that are processes: a process group of torch for each channel, and one sentence when one of them is lost."""

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from skirl.peers.base import CHANNELS, ON_DEVICE, Channel, Peers, Work, said_of
from skirl.peers.errors import PeerError, failed, missing
from skirl.peers.processes import Connections, is_gone, this_process

log = logging.getLogger("skirl")
SLICE = timedelta(seconds=0.25)
"""How long a thread waits before it looks for bad news, and lets Ctrl-C through."""
ROLL_CALL = 2.0
"""Seconds in which the others say that they are there, when one of them is not."""
ENDED, LOST = "skirl/ended", "skirl/lost"
"""Keys of the job's store: why the job ends, and that somebody is lost."""


class ProcessGroups(Peers):
    """One of several trainers that are processes; made by `skirl.peers.start.join`.

    **Arguments**

    - `store`: where ranks leave word for each other; rank 0 or the launcher serves it.
    - `device`: where the tensors of "rows" and "dense" are.
    - `backend`: of these two channels; None: "nccl" for a GPU and "gloo" for the CPU.
    - `patience`: seconds that a rank waits for another.
    - `port`: the store's.
    - `leave`: called when the groups are destroyed.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        device: torch.device,
        backend: str | None = None,
        patience: float = 600.0,
        port: int = 0,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), patience)
        self._store, self._port, self._leave = store, port, leave
        self._ended: str | None = None
        on_device = backend or ("nccl" if device.type == "cuda" else "gloo")
        longer = timedelta(seconds=2 * patience + 60)  # ours comes first, with a sentence
        with Connections() as self._connections:
            groups = {
                name: dist.new_group(backend=on_device if name in ON_DEVICE else "gloo", timeout=longer)
                for name in CHANNELS
            }
        self._channels = {name: _Group(self, name, group, on_device) for name, group in groups.items()}
        self._processes = self._introduced()

    @property
    def channels(self) -> dict[str, Channel]:
        return {**self._channels}

    def _introduced(self) -> list[Any]:
        """The machine and process of each rank."""
        mine = np.frombuffer(json.dumps(this_process()).encode(), np.uint8)
        come = self.channel("start").exchange([mine] * self.size, "who is there")
        return [json.loads(part.tobytes()) for part in come]

    def fail(self, error: BaseException | str) -> None:
        why = failed(self.rank, said_of(error))
        if self._ended is None:
            self._ended = why
            with suppress(Exception):  # whoever serves the store may be gone
                self._store.compare_set(ENDED, "", why)
        self._connections.cut([self._port])
        self._destroy()

    def close(self) -> None:
        try:
            if self._ended is None:
                self.channel("start").exchange([np.zeros(0, np.uint8)] * self.size, "the end")
        finally:
            self._destroy()

    def _destroy(self) -> None:
        for group in self._channels.values():
            group.destroy()
        self._leave()

    def ended(self) -> str | None:
        """Why the job ends, if it does: what another thread of this rank found out, or what another rank left word of."""
        if self._ended is None:
            try:
                if self._store.check([ENDED]):
                    self._ended = self._store.get(ENDED).decode()
                elif self._store.check([LOST]):
                    self._store.set(f"{LOST}/{self.rank}", "here")
            except Exception:
                return None  # what it stands for shows in the call itself
        return self._ended

    def lost(self, doing: str, began: float) -> NoReturn:
        """A call failed or took too long: find out who is missing, say so everywhere, and raise."""
        waited = time.monotonic() - began
        why = self.ended()
        others = [rank for rank in range(self.size) if rank != self.rank]
        absent = [rank for rank in others if is_gone(self._processes[rank])]
        if why is None and not absent:
            absent = others if self.size == 2 else self._roll_call(others)
            why = self.ended()
        if why is None:
            why = missing(self.rank, absent, doing, waited, self.patience)
            self._ended = why
            with suppress(Exception):
                self._store.compare_set(ENDED, "", why)
        self._connections.cut([self._port])
        raise PeerError(why)

    def _roll_call(self, others: list[int]) -> list[int]:
        """Who does not say that it is there; the one that serves the store, if nobody can be asked."""
        absent, until = others, time.monotonic() + ROLL_CALL
        try:
            self._store.set(LOST, str(self.rank))
            self._store.set(f"{LOST}/{self.rank}", "here")
            while absent and time.monotonic() < until and not self.ended():
                time.sleep(0.02)
                absent = [rank for rank in absent if not self._store.check([f"{LOST}/{rank}"])]
        except Exception:
            return [0]
        return absent


class _Group(Channel):
    """A channel over a process group."""

    def __init__(self, peers: ProcessGroups, name: str, group: Any, backend: str) -> None:
        super().__init__(name, peers.rank, peers.size)
        self._peers, self._group, self._destroyed = peers, group, False
        self._on_stream = backend == "nccl" and name in ON_DEVICE

    def _all_to_all(
        self, out: Tensor, send: Tensor, receive_counts: list[int], send_counts: list[int], doing: str
    ) -> Work:
        return self._begin(
            doing, lambda: dist.all_to_all_single(out, send, receive_counts, send_counts, self._group, async_op=True)
        )

    def _all_gather(self, out: Tensor, piece: Tensor, doing: str) -> Work:
        return self._begin(doing, lambda: _all_gather(out, piece, group=self._group, async_op=True))

    def _begin(self, doing: str, call: Callable[[], Any]) -> Work:
        if self._peers._ended is not None:
            raise PeerError(self._peers._ended)
        began = time.monotonic()
        try:
            return _Begun(self, call(), doing, began)
        except RuntimeError as error:
            self._lost(doing, began, error)

    def wait(self, work: Any, doing: str, began: float) -> None:
        """Until a call is done; on a stream of the device, until the stream knows of it."""
        if self._on_stream:
            work.wait()
            return
        while True:
            try:
                work.wait(SLICE)
                return
            except RuntimeError as error:
                if work.is_completed():
                    self._lost(doing, began, error)
            if (why := self._peers.ended()) is not None:
                raise PeerError(why)
            if time.monotonic() - began > self._peers.patience:
                self._lost(doing, began, None)

    def _lost(self, doing: str, began: float, error: RuntimeError | None) -> NoReturn:
        log.debug("%s: %r", doing, error)
        self._peers.lost(doing, began)

    def _fail(self, why: str) -> NoReturn:
        self._peers.fail(why)
        raise PeerError(why)

    def destroy(self) -> None:
        """Give the group's connections back."""
        if not self._destroyed and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._destroyed = True


class _Begun:
    """A call of a group that is on its way."""

    def __init__(self, group: _Group, work: Any, doing: str, began: float) -> None:
        self._group, self._work, self._doing, self._began = group, work, doing, began

    def wait(self) -> None:
        self._group.wait(self._work, self._doing, self._began)


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 has renamed it, and warns of the name before."""
