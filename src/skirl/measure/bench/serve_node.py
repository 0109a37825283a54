"""A memory node that talks over torch's default transports: `python -m`, with the words of `skirl serve` behind it."""

import sys
import time
from typing import Any

from skirl.store.remote import group, part
from skirl.store.remote.address import Address
from skirl.store.remote.meeting import Meeting
from skirl.store.remote.node import TICK, Node


def torchs_own(pipe: Any, numbers: Any, task: part.Task) -> None:
    """A part that talks over torch's default transports."""
    group.TRANSPORTS.clear()
    part.run(pipe, numbers, task)


def main(words: list[str]) -> None:
    """Serve until killed."""
    address, given = Address.meeting(words[0]), dict(zip(words[1::2], words[2::2]))
    patience = float(given["--patience"])
    node = Node(Meeting(address, keep=True, seconds=patience), 0, 1, patience=patience, body=torchs_own)
    while True:
        node.tick()
        time.sleep(TICK)


if __name__ == "__main__":
    main(sys.argv[1:])
