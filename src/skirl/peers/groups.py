"""Trainers that are processes: a process group of torch for each channel, and one sentence when one of them is lost."""

import json
import logging
import time
from collections.abc import Callable, Sequence
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
ROLL_CALL = 2.0
"""Seconds in which the others say that they are there, when one of them is not."""
ENDED, LOST = "skirl/ended", "skirl/lost"
"""Keys of the job's store: why the job ends; and, of each rank, that it lost somebody and so is there itself."""


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
        longer = timedelta(seconds=min(patience, 1e8))
        with Connections() as self._connections:
            groups = {
                name: dist.new_group(backend=on_device if name in ON_DEVICE else "gloo", timeout=longer)
                for name in CHANNELS
            }
        self._channels = {name: _Group(self, name, group, on_device) for name, group in groups.items()}
        self._processes: list[Any] = [[]] * self.size
        self._processes = self._introduced()

    @property
    def channels(self) -> dict[str, Channel]:
        return {**self._channels}

    def _introduced(self) -> list[Any]:
        """The machine and process of each rank."""
        mine = np.frombuffer(json.dumps(this_process()).encode(), np.uint8)
        come = self.channel("start").exchange([mine] * self.size, "who is there")
        return [json.loads(part.tobytes()) for part in come]

    @property
    def near(self) -> int:
        machine = self._processes[self.rank][:1]
        return sum(process[:1] == machine for process in self._processes)

    def fail(self, error: BaseException | str) -> None:
        why = failed(self.rank, said_of(error))
        if self._ended is None:
            self._ended = why
            with suppress(Exception):  # whoever serves the store may go now
                if self._has_store:
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

    @property
    def ended_here(self) -> str | None:
        """Why the job ends, as far as this rank knows."""
        return self._ended

    @property
    def _has_store(self) -> bool:
        """Whether rank 0, which may serve the store, lives: torch prints a stack for each word to one that is gone."""
        return not is_gone(self._processes[0])

    def _told(self) -> str | None:
        """Why the job ends, as another rank left word of it."""
        with suppress(Exception):
            if self._ended is None and self._has_store and self._store.check([ENDED]):
                self._ended = self._store.get(ENDED).decode()
        return self._ended

    def lost(self, doing: str, began: float) -> NoReturn:
        """A call failed or took too long: find out who is missing, say so everywhere, and raise."""
        waited = time.monotonic() - began
        others = [rank for rank in range(self.size) if rank != self.rank]
        absent = [rank for rank in others if is_gone(self._processes[rank])]
        why = self._told()
        with suppress(Exception):
            if self._has_store:
                self._store.set(f"{LOST}/{self.rank}", "here")
        self._connections.cut([self._port])  # others that wait for this rank hear of it, and so do this one's threads
        if why is None and not absent:
            absent = self._roll_call(others)
            why = self._told()
        if why is None:
            why = missing(self.rank, absent, doing, waited, self.patience)
            with suppress(Exception):
                if self._has_store:
                    why = self._store.compare_set(ENDED, "", why).decode()
            self._ended = why
        raise PeerError(why)

    def _roll_call(self, others: list[int]) -> list[int]:
        """Who does not say that it is there; the one that serves the store, if nobody can be asked."""
        absent, until = others, time.monotonic() + ROLL_CALL
        try:
            while absent and time.monotonic() < until and self._told() is None:
                time.sleep(0.02)
                absent = [rank for rank in absent if not self._store.check([f"{LOST}/{rank}"])]
        except Exception:
            return [0]
        return absent


class _Group(Channel):
    """A channel over a process group.

    Parts travel as messages between pairs of ranks. gloo's collectives give the same bits in nearly twice the time; NCCL's
    are made of such messages, and begun together.
    """

    def __init__(self, peers: ProcessGroups, name: str, group: Any, backend: str) -> None:
        super().__init__(name, peers.rank, peers.size)
        self._peers, self._group, self._destroyed = peers, group, False
        self._on_stream = backend == "nccl" and name in ON_DEVICE

    def _move(self, outs: list[Tensor], parts: list[Tensor], doing: str) -> Work:
        if (why := self._peers.ended_here) is not None:
            raise PeerError(why)
        began = time.monotonic()
        try:
            if self._on_stream:
                mine = outs[self.rank] = parts[self.rank].new_empty(0)
                return _Begun(self, [dist.all_to_all(outs, [*parts[: self.rank], mine, *parts[self.rank + 1 :]],
                                                     group=self._group, async_op=True)], doing, began)  # fmt: skip
            return self._messages(outs, parts, doing, began)
        except RuntimeError as error:
            self.lost(doing, began, error)

    def _messages(self, outs: list[Tensor], parts: list[Tensor], doing: str, began: float) -> Work:
        """Begin a message to and from each other rank; nothing travels where a part is empty."""
        works, late = [], []
        for distance in range(1, self.size):
            of, to = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            if outs[of].numel():
                on_host = outs[of].cpu() if outs[of].is_cuda else outs[of]
                late += [(outs[of], on_host)] if outs[of].is_cuda else []
                works.append(self._group.recv([on_host], of, 0))
            if parts[to].numel():
                works.append(self._group.send([parts[to].cpu()], to, 0))
        return _Begun(self, works, doing, began, late)

    def lost(self, doing: str, began: float, error: RuntimeError) -> NoReturn:
        """A call did not come to its end."""
        log.debug("%s: %r", doing, error)
        self._peers.lost(doing, began)

    def waits(self, work: Any) -> None:
        """Until a message is there; on a stream of the device, until the stream knows of it."""
        work.wait() if self._on_stream else work.wait(timedelta(seconds=min(self._peers.patience, 1e8)))

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

    def __init__(
        self, group: _Group, works: list[Any], doing: str, began: float, late: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        self._group, self._works, self._doing, self._began, self._late = group, works, doing, began, late

    def wait(self) -> None:
        try:
            for work in self._works:
                self._group.waits(work)
        except RuntimeError as error:
            self._group.lost(self._doing, self._began, error)
        for out, on_host in self._late:
            out.copy_(on_host)
