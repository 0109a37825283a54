"""Addresses of nodes, and the meeting point that a node keeps at its own: a TCPStore with notes, through which owners ask
for their part. Each note is JSON under its key. Rows do not pass through it.
"""

import json
import logging
import os
import re
import socket
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

log = logging.getLogger("skirl")
_SPEC = re.compile(
    r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})(/rank-(?P<owner>[0-9]{1,9})(-(?P<cut>[0-9a-f]{8}))?)?"
)


@dataclass(frozen=True)
class Address:
    """The address of a meeting point, as seen by one owner."""

    host: str
    port: int
    owner: int = 0
    cut: str = field(default="", compare=False)
    """The mark of an owner's columns of tables that are cut, which has other records than another one."""

    @classmethod
    def parse(cls, spec: str, scheme: str = "rpc://") -> "Address":
        match = _SPEC.fullmatch(spec.removeprefix(scheme))
        if not spec.startswith(scheme) or match is None or not 0 < int(match["port"]) < 1 << 16:
            what = "store" if scheme else "address"
            raise ValueError(f"{what} is {spec!r}: write it {scheme}HOST:PORT, such as {scheme}127.0.0.1:29400")
        return cls(match["host"].strip("[]"), int(match["port"]), int(match["owner"] or 0), match["cut"] or "")

    @property
    def loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def hush() -> None:
    """Keep PyTorch from printing a warning for each connection that ends. It has to be called before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


class NodeError(RuntimeError):
    """A memory node does not answer, or refuses a call. The message names the node and says what to do."""


class Meeting:
    """A node keeps it (`keep`), and owners wait until it is there."""

    def __init__(self, address: Address, *, keep: bool = False, seconds: float = 60.0) -> None:
        self.address = address
        listening = self._listen() if keep else self._wait(seconds)
        from torch.distributed import PrefixStore, TCPStore

        try:
            where, limit = (address.host, address.port, None, keep), timedelta(seconds=seconds)
            self.store = TCPStore(*where, limit, wait_for_workers=False, master_listen_fd=listening)
        except RuntimeError as error:
            raise NodeError(
                f"{address} answers but is not a node of skirl ({str(error).partition(chr(10))[0][:120]}): name the address "
                "of a `skirl serve`"
            ) from None
        self._notes = PrefixStore("skirl", self.store)

    def _listen(self) -> int:
        try:
            family = socket.AF_INET6 if ":" in self.address.host else socket.AF_INET
            address = self.address.host, self.address.port
            return socket.create_server(address, family=family, backlog=1024).detach()
        except OSError as error:
            raise NodeError(
                f"nothing can listen at {self.address} ({error.strerror}): set address to a free port at an address of this "
                "machine"
            ) from None

    def _wait(self, seconds: float) -> None:
        began, told = time.monotonic(), False
        while True:
            try:
                socket.create_connection((self.address.host, self.address.port), timeout=2).close()
                return
            except OSError as error:
                waited = time.monotonic() - began
                if not told and waited > 1.0:
                    told = True
                    log.warning("waiting for a memory node at %s, up to %.0f s", self.address, seconds)
                if waited > seconds:
                    raise NodeError(
                        f"nobody answers at {self.address} after {waited:.0f} s ({error.strerror or error}): start "
                        f"`skirl serve {self.address}` there"
                    ) from None
                time.sleep(0.1)

    def _do(self, call: Any, *args: Any) -> Any:
        try:
            return call(*args)
        except RuntimeError:
            raise NodeError(f"the node at {self.address} is gone: start it again, and whoever has rows there") from None

    def number(self) -> int:
        """Return a number that no other run has here."""
        return self._do(self._notes.add, "runs", 1)

    def leave(self, key: str, note: Any) -> None:
        self._do(self._notes.set, key, json.dumps(note))

    def take(self, key: str) -> Any:
        """Return a note and delete it, or return None if there is none."""
        if not self._do(self._notes.check, [key]):
            return None
        note = json.loads(self._do(self._notes.get, key))
        self._do(self._notes.delete_key, key)
        return note

    def asks(self) -> list[str]:
        """Return the keys of the notes by which owners ask for a part, in the order of their runs."""
        keys = [key.removeprefix("skirl/") for key in self._do(self.store.list_keys) if key.startswith("skirl/ask/")]
        return sorted(keys, key=lambda key: int(key.rpartition("/")[2]))

    def group(self, run: int) -> Any:
        """Return the store in which the group of a run is formed. Each run has its own."""
        from torch.distributed import PrefixStore

        return PrefixStore(f"run-{run}", self.store)
