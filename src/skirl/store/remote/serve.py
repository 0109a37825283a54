"""`skirl serve`: a memory node, which keeps rows for trainers on other machines."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from skirl.store.remote.meeting import Address, Meeting, hush
from skirl.tools.interrupts import Signals
from skirl.tools.os_errors import writing


@dataclass
class Serve:
    """Keep rows for trainers that name its address: `skirl train --store rpc://HOST:PORT`.

    Whoever can reach it can make it do anything: use networks that you trust.
    """

    positional: ClassVar[tuple[str, ...]] = ("address",)

    address: str = "127.0.0.1:29400"
    """HOST:PORT of this machine where trainers meet it. A loopback address admits only this machine."""
    store: str = "memory"
    """Where rows are kept: memory, or disk:FOLDER."""

    def __post_init__(self) -> None:
        Address.parse(self.address, "")
        if self.store != "memory" and not (self.store.startswith("disk:") and self.store != "disk:"):
            raise ValueError(f"store is {self.store!r}: set it to memory or disk:FOLDER")

    def run(self) -> dict[str, Any]:
        hush()
        from skirl.store.remote.node import TICK, Node
        from skirl.store.remote.store import TIMEOUT
        from skirl.tools.units import timeout_of

        with Signals(once=True) as signals:
            timeout = timeout_of(os.environ, TIMEOUT)
            address = Address.parse(self.address, "")
            if self.store != "memory":
                with writing(folder := self.store.removeprefix("disk:")):
                    Path(folder).mkdir(parents=True, exist_ok=True)
            meeting = Meeting(address, keep=True, seconds=timeout)
            node = Node(meeting, rows=self.store, timeout=timeout)
            try:
                reach = (
                    "only this machine reaches it"
                    if address.loopback
                    else "without passwords or encryption: use networks that you trust"
                )
                print(f"skirl serve: {address} keeps rows in {self.store}, {reach}", file=sys.stderr, flush=True)
                while signals.came is None:
                    node.tick()
                    time.sleep(TICK)
                node.drain()
            finally:
                node.kill()
        return {"node": str(address), "ended_by": signals.came}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        return {"node": result["node"], "ended by": result["ended_by"]}
