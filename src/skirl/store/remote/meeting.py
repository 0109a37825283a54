"""The meeting point: a TCPStore in which nodes and owners find each other. Rows do not pass through it.

Nodes and owners leave notes there, each as JSON under its key. Counters number runs and requests.
"""

import json
import socket
import time
from datetime import timedelta
from typing import Any

from skirl.store.remote.wire import Address, NodeError

VERSION = 2
"""Version of the protocol between nodes and owners."""


class Lost(NodeError):
    """The meeting point cannot be reached, so neither can the node that keeps it."""


class Meeting:
    """One process's access to a meeting point."""

    def __init__(self, address: Address, *, keep: bool = False, seconds: float = 60.0) -> None:
        self.address = address
        self._seconds = seconds
        listening = self._listen() if keep else self._wait()
        from torch.distributed import PrefixStore, TCPStore

        try:
            self.store = TCPStore(
                address.host,
                address.port,
                None,
                keep,
                timedelta(seconds=seconds),
                wait_for_workers=False,
                master_listen_fd=listening,
            )
        except RuntimeError as error:
            raise Lost(
                f"{address} answers but is not a meeting point of skirl ({_first_line(error)}): name the one that `skirl "
                "serve` keeps"
            ) from None
        self._notes = PrefixStore("skirl", self.store)

    def _listen(self) -> int:
        try:
            family = socket.AF_INET6 if ":" in self.address.host else socket.AF_INET
            address = self.address.host, self.address.port
            return socket.create_server(address, family=family, backlog=1024).detach()
        except OSError as error:
            raise NodeError(
                f"nothing can listen at {self.address} ({error.strerror}): set meet to a free port at an address of this "
                "machine, which the node 0 keeps"
            ) from None

    def _wait(self) -> None:
        began = time.monotonic()
        while True:
            try:
                socket.create_connection((self.address.host, self.address.port), timeout=2).close()
                return
            except OSError as error:
                waited = time.monotonic() - began
                if waited > self._seconds:
                    why = error.strerror or str(error)
                    raise Lost(
                        f"nobody answers at {self.address} after {waited:.0f} s ({why}): start `skirl serve --meet "
                        f"{self.address}` there"
                    ) from None
                time.sleep(0.1)

    def _do(self, call: Any, *args: Any) -> Any:
        try:
            return call(*args)
        except RuntimeError:
            raise Lost(
                f"the meeting point {self.address} is gone: start its node again, and whatever has met there"
            ) from None

    def count(self, key: str, more: int = 0) -> int:
        """Increase a counter by `more`, and return its value."""
        return self._do(self._notes.add, key, more)

    def tell(self, key: str, note: Any) -> None:
        """Leave a note."""
        self._do(self._notes.set, key, json.dumps(note))

    def note(self, key: str) -> Any:
        """Return a note, or None if there is none."""
        if not self._do(self._notes.check, [key]):
            return None
        return json.loads(self._do(self._notes.get, key))

    def notes(self) -> list[str]:
        """Return the keys of all notes and counters."""
        return [key.removeprefix("skirl/") for key in self._do(self.store.list_keys) if key.startswith("skirl/")]

    def forget(self, key: str) -> None:
        """Delete a note."""
        self._do(self._notes.delete_key, key)

    def group(self, run: int) -> Any:
        """Return the store in which the group of a run is formed. Each run has its own."""
        from torch.distributed import PrefixStore

        return PrefixStore(f"run-{run}", self.store)

    def forget_group(self, run: int) -> None:
        """Delete the store of a run's group, once all members have left."""
        for key in self._do(self.store.list_keys):
            if key.startswith(f"run-{run}/"):
                self._do(self.store.delete_key, key)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
