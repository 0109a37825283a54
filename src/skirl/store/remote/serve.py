"""`skirl serve`: a memory node, which keeps rows for trainers on other machines."""

import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


@dataclass
class Serve:
    """Keep rows for trainers that name the same meeting point: `skirl train --store rpc://HOST:PORT`.

    Node 0 keeps that meeting point. Whoever can reach it can make a node do anything: use networks that you trust.

    >>> Serve(meet="127.0.0.1:29400", node=3)
    Traceback (most recent call last):
    ValueError: node is 3 and nodes is 1: number nodes from 0 to 0, or raise nodes
    """

    positional: ClassVar[str] = "meet"
    example: ClassVar[str] = "skirl serve 127.0.0.1:29400"

    meet: str = "127.0.0.1:29400"
    """HOST:PORT where nodes and trainers meet, at an address of node 0. A loopback address admits only this machine."""
    nodes: int = 1
    """Number of nodes that meet there; the same for all of them."""
    node: int = 0
    """The number of this node, from 0."""
    rows: str = "memory"
    """Where rows are kept: memory, or disk:FOLDER."""
    memory: str | None = None
    """The most memory that the rows of this node may take, such as 100GB; no limit if not given."""
    metrics: str | None = None
    """HOST:PORT, or a port of 127.0.0.1, that serves /metrics for Prometheus; none if not given."""
    patience: float | None = None
    """Seconds that a call may take; $SKIRL_PATIENCE or 60 if not given."""

    def __post_init__(self) -> None:
        from skirl.store.remote.wire import Address

        Address.meeting(self.meet)
        if self.nodes < 1:
            raise ValueError(f"nodes is {self.nodes}: set it to 1 or more")
        if not 0 <= self.node < self.nodes:
            raise ValueError(
                f"node is {self.node} and nodes is {self.nodes}: number nodes from 0 to {self.nodes - 1}, or raise nodes"
            )
        if self.rows != "memory" and not (self.rows.startswith("disk:") and self.rows != "disk:"):
            raise ValueError(f"rows is {self.rows!r}: set it to memory or disk:FOLDER")
        if self.patience is not None and not self.patience > 0:
            raise ValueError(f"patience is {self.patience}: set it to seconds above 0")
        self._limit()
        self._metrics()

    def _limit(self) -> int | None:
        from skirl.tools.units import parse_bytes

        if self.memory is None:
            return None
        try:
            limit = parse_bytes(self.memory)
        except ValueError as error:
            raise ValueError(f"memory is {error}") from None
        if limit < 1:
            raise ValueError(f"memory is {self.memory!r}: set it above 0")
        return limit

    def _metrics(self) -> tuple[str, int] | None:
        from skirl.store.remote.wire import Address

        if self.metrics is None:
            return None
        text = self.metrics if ":" in self.metrics else f"127.0.0.1:{self.metrics}"
        try:
            address = Address.meeting(text)
        except ValueError:
            raise ValueError(f"metrics is {self.metrics!r}: write it HOST:PORT, or a port such as 9400") from None
        return address.host, address.port

    def run(self) -> dict[str, Any]:
        """Serve until SIGTERM or Ctrl-C, then finish calls in progress and end."""
        import os

        from skirl.store.remote.wire import Address, hush

        hush()
        from skirl.store.remote import metrics
        from skirl.store.remote.connection import PATIENCE
        from skirl.store.remote.meeting import Meeting
        from skirl.store.remote.node import TICK, Node
        from skirl.tools.units import patience_of

        told: list[int] = []
        before = {n: signal.signal(n, lambda number, _: told.append(number)) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            patience = self.patience or patience_of(os.environ, PATIENCE)
            address = Address.meeting(self.meet)
            if self.rows != "memory":
                self._folder()
            meeting = Meeting(address, keep=self.node == 0, seconds=patience)
            node = Node(meeting, self.node, self.nodes, rows=self.rows, limit=self._limit(), patience=patience)
            try:
                where = self._metrics()
                side = None if where is None else metrics.serve(where, lambda: metrics.text(node))
                print(self._said(address), file=sys.stderr, flush=True)
                while not told:
                    node.tick()
                    time.sleep(TICK)
                node.drain()
                if side is not None:
                    side.shutdown()
            finally:
                node.kill()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return {"node": self.node, "ended_by": signal.Signals(told[0]).name}

    def _folder(self) -> None:
        folder = Path(self.rows.removeprefix("disk:"))
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"rows is {self.rows!r}, which is a file: name a folder")
        folder.mkdir(parents=True, exist_ok=True)

    def _said(self, address: Any) -> str:
        others = "" if self.nodes == 1 else f" of {self.nodes}"
        open_to = (
            "only this machine reaches it"
            if address.host == "localhost" or address.host.startswith("127.")
            else "without passwords or encryption: use networks that you trust"
        )
        return f"skirl serve: node {self.node}{others} keeps rows in {self.rows}; they meet at {address}, {open_to}"

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return how the node ended, for people to read."""
        return {"node": str(result["node"]), "ended by": result["ended_by"]}
