"""Memory nodes as one store: each node has a part, and a call goes to all of them at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from skirl.core.placement import Placement
from skirl.store import cut
from skirl.store.base import Facts, Frozen, Layout, Record, Rows, SavedRows, Store, at_once
from skirl.store.disk.frozen import manifest_of
from skirl.store.remote.connection import Connection, connection
from skirl.store.remote.wire import Address, NodeError, NumberedCalls

PIECE_BYTES = 16 << 20
"""Most bytes of rows that a call carries. Several calls are in flight at once."""


class RemoteStore(Store):
    """The store behind `store="rpc://HOST:PORT"`, with rows on the memory nodes that meet there."""

    def __init__(
        self, spec: str, layout: Layout | Mapping[int, Record], *, rows: Mapping[int, int] | None = None
    ) -> None:
        super().__init__(layout)
        self.closed = True
        self._address = Address.parse(spec)
        self._nodes: Connection = connection(self._address)
        self._placement = Placement.even(self._nodes.nodes, "store")
        self._puts = [NumberedCalls() for _ in range(self._nodes.nodes)]
        about = [self.layout.facts(), None if rows is None else {int(t): int(n) for t, n in rows.items()}]
        none = [None] * self._nodes.nodes
        opened = self._nodes.job_of_all("open", none, [tuple(about)] * self._nodes.nodes)
        self._stores: list[int] = [each["store"] for each in opened]
        self.durable = opened[0]["durable"]
        self.about = opened[0]["about"]
        self._take_point(opened)
        self.closed = False

    def __repr__(self) -> str:
        return f"RemoteStore('rpc://{self._address}')"

    def _take_point(self, points: Sequence[Mapping[str, Any]]) -> None:
        self.identity = points[0]["identity"]
        self.generation = max(point["generation"] for point in points)

    def _each(self, *args: Any) -> list[tuple[Any, ...]]:
        """Return the arguments of a call to all parts, each with its own store first."""
        return [(store, *args) for store in self._stores]

    # Rows

    def _pieces(self, kind: int, keys: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64] | slice]]:
        """Split the rows of a call by node, in pieces of bounded size. Yield each piece's node and indices in the call."""
        record = self.layout.kinds[kind]
        most = max(1, PIECE_BYTES // record.nbytes)
        if self._nodes.nodes == 1:
            for start in range(0, keys.size, most):
                yield 0, slice(start, min(start + most, keys.size))
            return
        starts, order = np.zeros(self._nodes.nodes + 1, np.int64), np.empty(keys.size, np.int64)
        cut.by_site(self._placement.site_of(keys), starts, order)
        for node in range(self._nodes.nodes):
            for start in range(starts[node], starts[node + 1], most):
                yield node, order[start : min(start + most, starts[node + 1])]

    def _read(self, kind: int, keys: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]) -> None:
        pieces = list(self._pieces(kind, keys))
        calls = [(node, "get", (self._stores[node], kind, _tensor(keys[at]))) for node, at in pieces]
        for (node, at), (rows, held) in zip(pieces, self._nodes.answers(calls), strict=True):
            self._put_in(out, found, at, *self._checked(node, len(keys[at]), out, rows, held))

    def _checked(self, node: int, n: int, out: Rows, rows: Any, held: Any) -> tuple[Any, Any]:
        """Return the rows and mask that a node sent, or raise a NodeError if they do not fit the request."""
        mask = None if held is None else held.numpy()
        count = n if mask is None else int(np.count_nonzero(mask))
        values = np.empty((0, out.shape[1]), out.dtype) if rows is None else rows.numpy()
        if values.dtype != out.dtype or values.shape != (count, out.shape[1]) or (mask is not None and len(mask) != n):
            raise NodeError(
                f"node {node} gave {values.dtype} {list(values.shape)} for {n} rows of {out.dtype} [{out.shape[1]}]: "
                "install the same version of skirl on all machines"
            )
        return values, mask

    def _put_in(
        self, out: Rows, found: NDArray[np.bool_], at: NDArray[np.int64] | slice, values: Rows, mask: Any
    ) -> None:
        if isinstance(at, slice) and mask is None:
            out[at] = values
            found[at] = True
            return
        order = np.arange(at.start, at.stop) if isinstance(at, slice) else at
        order = order if mask is None else order[mask]
        cut.give(values, order, out)
        found[order] = True

    def _write(self, kind: int, keys: NDArray[np.int64], rows: Rows) -> None:
        calls, begun = [], []
        for node, at in self._pieces(kind, keys):
            if isinstance(at, slice):
                values = rows[at]
            else:
                values = np.empty((len(at), rows.shape[1]), rows.dtype)
                cut.take(rows, at, values)
            number, settled = self._puts[node].begin()
            begun.append((node, number))
            args = self._stores[node], self._nodes.run, number, settled, kind, _tensor(keys[at]), _tensor(values)
            calls.append((node, "put", args))
        self._nodes.answers(calls)
        for node, number in begun:
            self._puts[node].done(number)

    def held(self) -> Iterator[NDArray[np.int64]]:
        self._check_open()
        for node, store in enumerate(self._stores):
            walk = self._nodes.call(node, "walk", store)
            while (found := self._nodes.call(node, "step", store, walk)) is not None:
                yield found.numpy()

    # Points

    def describe(self, about: Mapping[str, Any] | None = None) -> int:
        """See `Store.describe`. Nodes are told what rows start from only if these outlive this run."""
        if about is not None:
            self._check_open()
            self.about = dict(about)
            if self.durable:
                self.about = {name: of if isinstance(of, str) else of.digest for name, of in about.items()}
            self._take_point(self._job("describe", self.about if self.durable else {}))
        return sum(self._nodes.of_all("count", self._each()))

    def _job(self, what: str, *args: Any) -> list[Any]:
        return self._nodes.job_of_all(what, self._stores, [args] * len(self._stores))

    def freeze(self, folder: Path, since: Facts | None) -> Frozen:
        """See `Store.freeze`. The nodes write to the folder, so it must have the same path on all machines."""
        self._check_open()
        parts = None if since is None else cut.own_parts(since, self._placement.digest)
        each = [(s, str(folder.absolute()), None if parts is None else parts[i]) for i, s in enumerate(self._stores)]
        frozen = FrozenOnNodes(self)
        try:
            points = self._nodes.of_all("freeze", each)
        except BaseException:
            frozen.release()
            raise
        self._take_point(points)
        return frozen

    def thaw(self, saved: SavedRows, ready: Callable[[], Any] = at_once) -> None:
        """See `Store.thaw`. If rows were split the same way, each node takes its own; else each looks through all.

        The nodes read the files twice, so that none has changed its rows when another finds damage.
        """
        self._check_open()
        for part in saved.parts:
            manifest_of(saved.folder, part.facts, self.layout)
        nodes, digest = range(self._nodes.nodes), self._placement.digest
        told: list[list[Any]] = [[] for _ in nodes]
        self._nodes.of_all("lay", self._each(0, None, None))
        for number, part in enumerate(saved.parts):
            shard = [] if part.shard is None else part.shard.facts
            own = cut.own_parts(part.facts, digest)
            for node in nodes:
                at = [] if own is not None or len(nodes) == 1 else [(self._placement.facts, node)]
                told[node].append((part.facts if own is None else own[node], shard + at))
            for keys, rows in part.own(part.over):
                self._lay(number, keys, rows)
        where = str(saved.folder.absolute())
        checks = [(where, [facts for facts, _ in each]) for each in told]
        self._nodes.job_of_all("check", self._stores, checks)
        ready()
        args = [(where, each, saved.identity, saved.generation) for each in told]
        self._take_point(self._nodes.job_of_all("thaw", self._stores, args))

    def _lay(self, part: int, keys: NDArray[np.int64], rows: Rows) -> None:
        calls = []
        for node, at in self._pieces(self.layout.kind(keys, rows), np.ascontiguousarray(keys)):
            args = (self._stores[node], part, _tensor(keys[at]), _tensor(rows[at]))
            calls.append((node, "lay", args))
        self._nodes.answers(calls)

    def close(self, *, flush: bool = True) -> None:
        """Have the nodes close their stores, which flush if they are on disk. If a node has failed, tell none of them."""
        if not self.closed:
            super().close()
            if self._nodes.failure is None and not self._nodes.closed:
                self._nodes.of_all("close", self._each())


class FrozenOnNodes(Frozen):
    """The rows of all parts at one moment."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store

    def write(self) -> Facts:
        """Have all nodes write, in threads of their own."""
        return cut.joined(self._store._job("write"), self._store._placement.digest)

    def release(self) -> None:
        """Have the nodes release what they keep. If one is gone, so is what it kept."""
        with suppress(NodeError):
            self._store._nodes.of_all("release", self._store._each())


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return an array as a tensor that a call can carry, without a copy if possible."""
    return torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else array.copy())
