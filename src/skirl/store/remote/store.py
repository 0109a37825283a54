"""A memory node as a store, and this process's connection to it."""

import atexit
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from skirl.store.base import Facts, Frozen, Layout, Record, Rows, SavedRows, Store
from skirl.store.remote import node as nodes
from skirl.store.remote import rpc
from skirl.store.remote.meeting import Address, Meeting, NodeError
from skirl.tools.units import timeout_of

log = logging.getLogger("skirl")

TIMEOUT = 60.0
"""Seconds that a call may take, unless SKIRL_TIMEOUT is set."""
LOOK = 0.5
"""Seconds after which a part is asked whether it is alive, while a call takes long."""
PIECE_BYTES = 16 << 20
"""Most bytes of rows that a call carries. Several calls are in flight at once."""


@dataclass
class Group:
    """The RPC group that this process has joined, in which all its parts are, on whatever node."""

    address: Address
    run: int
    parts: int = 0


_group: Group | None = None
"""PyTorch RPC has one group in a process."""
_lock = threading.Lock()
_connected: dict[Address, "Connection"] = {}


class Connection:
    def __init__(self, address: Address, timeout: float) -> None:
        global _group
        self.address, self.timeout = address, timeout
        self.failure: str | None = None
        """Why no more calls are made, or None while they are."""
        self.closed = False
        meeting = Meeting(address, seconds=timeout)
        self.run = meeting.number()
        try:
            if _group is None:
                rpc.join(meeting.group(self.run), address, nodes.owner_name(address.owner, self.run), 0, timeout)
                _group = Group(address, self.run)
            _group.parts += 1
            self.name = nodes.part_name(_group.parts, _group.run)
            ask = {"version": nodes.VERSION, "run": self.run, "owner": address.owner}
            ask |= {"meet": str(_group.address), "group": _group.run, "rank": _group.parts}
            meeting.leave(f"ask/{self.run}", ask)
            began = time.monotonic()
            while (answer := meeting.take(f"answer/{self.run}")) is None:
                if (waited := time.monotonic() - began) > timeout:
                    raise NodeError(f"the node at {address} has not answered within {waited:.0f} s: start it again")
                time.sleep(0.02)
            if answer["refused"] is not None:
                raise NodeError(answer["refused"])
        except rpc.Failed as error:
            raise NodeError(f"no group for rows is formed at {address}: {error}") from None

    def end(self) -> None:
        if not self.closed:
            self.closed = True
            with suppress(rpc.Failed):
                if self.failure is None:
                    rpc.end(rpc.begin(self.name, nodes.call, ("bye",), min(self.timeout, 5.0)))

    def call(self, method: str, *args: Any) -> Any:
        return self.calls(method, [args])[0]

    def calls(self, method: str, args: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Make several calls at once, wait for all of them even if one fails, and return their results."""
        results, wrong = list[Any](), None
        for future in [self._begin(method, each, self.timeout) for each in args]:
            try:
                results.append(self._result(method, future))
            except Exception as error:
                wrong = wrong or error
        if wrong is not None:
            raise wrong
        return results

    def job(self, method: str, *args: Any) -> Any:
        """Call a method that may take as long as it likes while its part answers other calls."""
        done = threading.Event()
        future = self._begin(method, args, rpc.FOREVER)
        future.add_done_callback(lambda _: done.set())
        with self._watched(method):
            while not done.wait(LOOK):
                rpc.end(rpc.begin(self.name, nodes.alive, (), self.timeout))
        return self._result(method, future)

    def _begin(self, method: str, args: tuple[Any, ...], seconds: float) -> Any:
        if self.failure is not None:
            raise NodeError(self.failure)
        if self.closed:
            raise NodeError(f"this process has left the node at {self.address}: make new embeddings")
        with self._watched(method):
            return rpc.begin(self.name, nodes.call, (method, *args), seconds)

    def _result(self, method: str, future: Any) -> Any:
        with self._watched(method):
            kind, value = rpc.end(future)
        if kind == "error":
            raise rpc.raised(value, str(self.address))
        return value

    @contextmanager
    def _watched(self, method: str) -> Iterator[None]:
        """Once a call fails in such a block, make every later one fail, because it is unknown what the node has done."""
        try:
            yield
        except rpc.Failed as error:
            if self.failure is None:
                late = str(error) == rpc.LATE
                how = f"has not answered within {self.timeout:g} s" if late else "is gone"
                self.failure = (
                    f"the node at {self.address} {how}: start it again (what it printed last may say why it ended), and go "
                    "on from the run's last checkpoint, if it has one"
                )
                log.debug("%s: %s: %s", method, self.failure, error)
            raise NodeError(self.failure) from None


def leave() -> None:
    global _group
    for there in _connected.values():
        with suppress(Exception):
            there.end()
    _connected.clear()
    _group = None
    rpc.leave()


atexit.register(lambda: leave() if _connected else None)


def connection(address: Address) -> Connection:
    """Return this process's connection to a node. Make a new one if there is none or it was lost."""
    with _lock:
        if any(there.failure is not None or there.closed for there in _connected.values()):
            leave()  # all of them: nobody can join a group with a member that is gone
        for there in _connected.values():
            if there.address.owner != address.owner:
                raise ValueError(
                    f"this process has rows of trainer {there.address.owner} at {there.address}, and was told to open those "
                    f"of trainer {address.owner}: let each process be one trainer"
                )
        if address not in _connected:
            try:
                _connected[address] = Connection(address, timeout_of(os.environ, TIMEOUT))
            except BaseException:
                if not _connected:
                    leave()
                raise
        return _connected[address]


class RemoteStore(Store):
    """The store behind `store="rpc://HOST:PORT"`, with rows on the memory node there."""

    def __init__(
        self, spec: str, layout: Layout | Mapping[int, Record], *, rows: Mapping[int, int] | None = None
    ) -> None:
        super().__init__(layout)
        self.closed = True
        address = Address.parse(spec)
        self._node = connection(address)
        of_tables = None if rows is None else {int(t): int(n) for t, n in rows.items()}
        facts = self._node.job("open", self.layout.facts(), of_tables, address.cut)
        self._number: int = facts["store"]
        self.durable, self.about = facts["durable"], facts["about"]
        self._take_point(facts)
        self.closed = False

    def __repr__(self) -> str:
        return f"rpc://{self._node.address}"

    def _take_point(self, facts: Facts) -> None:
        self.identity, self.generation = facts["identity"], facts["generation"]

    # Rows

    def _pieces(self, kind: int, size: int) -> Iterator[slice]:
        most = max(1, PIECE_BYTES // self.layout.kinds[kind].nbytes)
        for start in range(0, size, most):
            yield slice(start, min(start + most, size))

    def _read(self, kind: int, keys: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]) -> None:
        pieces = list(self._pieces(kind, keys.size))
        args = [(self._number, kind, _tensor(keys[at])) for at in pieces]
        for at, (rows, held) in zip(pieces, self._node.calls("get", args), strict=True):
            found[at] = held.numpy()
            out[at][found[at]] = rows.numpy()

    def _write(self, kind: int, keys: NDArray[np.int64], rows: Rows) -> None:
        pieces = self._pieces(kind, keys.size)
        self._node.calls("put", [(self._number, _tensor(keys[at]), _tensor(rows[at])) for at in pieces])

    def held(self) -> Iterator[NDArray[np.int64]]:
        self._check_open()
        anew = True
        while (keys := self._node.call("held", self._number, anew)) is not None:
            yield keys.numpy()
            anew = False

    # Points

    def describe(self, about: Mapping[str, Any] | None = None) -> int:
        """The node is told what rows start from only if these outlive this run."""
        if about is None:
            return self._node.call("describe", self._number)["rows"]
        self._check_open()
        self.about = dict(about)
        if self.durable:
            self.about = {name: of if isinstance(of, str) else of.digest for name, of in about.items()}
        facts = self._node.job("describe", self._number, self.about if self.durable else {})
        self._take_point(facts)
        return facts["rows"]

    def freeze(self, folder: Path, since: Facts | None) -> Frozen:
        """The node writes to the folder, so it must have the same path on all machines."""
        self._check_open()

        def release() -> None:
            with suppress(NodeError):  # if the node is gone, so is what it kept
                self._node.job("release", self._number)

        try:
            self._take_point(self._node.job("freeze", self._number, str(folder.absolute()), since))
        except BaseException:
            release()
            raise
        return Frozen(lambda: self._node.job("write", self._number), release)

    def thaw(self, saved: SavedRows) -> None:
        self._check_open()
        where = str(saved.folder.absolute())
        parts = [(each.facts, [] if each.shard is None else each.shard.facts) for each in saved.parts]
        self._take_point(self._node.job("thaw", self._number, where, parts, saved.identity, saved.generation))

    def close(self, *, flush: bool = True) -> None:
        """Have the node close its store, which flushes if it is on disk. If the node has failed, it is told nothing."""
        if not self.closed:
            super().close()
            if self._node.failure is None and not self._node.closed:
                self._node.job("close", self._number)


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return an array as a tensor that a call can carry, without a copy if possible."""
    return torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else array.copy())
