"""The whole epoch's future: a first pass spools which rows each batch uses, a backward scan finds every next use.

The spool is a file of 4 bytes a distinct row and batch, so an epoch of 4.2 billion ids (Criteo Terabyte, batch 16,384) takes
about 100 GB at most and memory stays O(distinct rows); it is let go when the second pass begins. Keeping batches in memory
instead would bound the epoch by RAM.

The second pass must bring the same batches in the same order: a digest of every batch's ids is compared.
"""

import hashlib
import tempfile
from types import TracebackType

import numpy as np
from numba import njit

from skirl.oracle.entries import NEVER, Entries
from skirl.tables import Schema


class OrderChanged(ValueError):
    """The second pass over the loader brought other batches than the first."""


class Epoch:
    """Next uses of a whole epoch.

    >>> from skirl import Table
    >>> with Epoch(Schema.of([Table("a", 100, 4)])) as epoch:
    ...     for ids in ([1, 2], [2, 3], [1, 1]):
    ...         epoch.add([np.array(ids)])
    ...     epoch.scan()
    ...     epoch.next_uses([np.array([1, 2])])[0].tolist()  # in order of last position: row 1, row 2
    [2, 1]
    """

    def __init__(self, schema: Schema) -> None:
        self._banks = [_BankSpool(schema, bank) for bank in range(len(schema.banks))]
        self._digests: list[bytes] = []
        self._next = 0

    def add(self, keys: list[np.ndarray]) -> None:
        """One more batch of the first pass."""
        for spool, part in zip(self._banks, keys, strict=True):
            spool.add(part, len(self._digests))
        self._digests.append(_digest(keys))

    def scan(self) -> None:
        """The first pass is over: find next uses."""
        for spool in self._banks:
            spool.scan()

    def first_uses(self, bank: int, keys: np.ndarray) -> np.ndarray:
        """For rows resident at the start: the first batch that uses each. Ask before the second pass begins."""
        return self._banks[bank].first_uses(keys)

    def next_uses(self, keys: list[np.ndarray]) -> list[np.ndarray]:
        """The next uses of the next batch of the second pass, whose keys must be those of the first."""
        number = self._next
        if number >= len(self._digests):
            raise OrderChanged(
                f'depth="epoch": the loader yields more batches than the {len(self._digests)} of the first pass. '
                "It must yield the same batches in the same order each time; fix its seed, or use depth='auto'"
            )
        if _digest(keys) != self._digests[number]:
            raise OrderChanged(
                f'depth="epoch": batch {number} has other ids than in the first pass. The loader must yield the same '
                "batches in the same order each time; fix its seed, or use depth='auto'"
            )
        self._next += 1
        return [spool.next_uses(number) for spool in self._banks]

    def close(self) -> None:
        """Drop the spool."""
        for spool in self._banks:
            spool.file.close()

    def __enter__(self) -> "Epoch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _BankSpool:
    """One bank's distinct rows by batch, as entries; after the scan, their next uses in the same places."""

    def __init__(self, schema: Schema, bank: int) -> None:
        self._entries: Entries | None = Entries(schema, schema.banks[bank].tables, 1 << 20)
        self.file = tempfile.TemporaryFile(prefix="skirl-spool-")  # noqa: SIM115 closed with the epoch
        self._starts = [0]
        self._upcoming = np.empty(0, np.int32)
        """By entry: its first use at or after the batch that the scan has reached."""

    def add(self, keys: np.ndarray, number: int) -> None:
        assert self._entries is not None
        found, _ = self._entries.enter(keys, number)
        self.file.write(found.data)
        self._starts.append(self._starts[-1] + len(found))

    def scan(self) -> None:
        assert self._entries is not None
        self._upcoming = np.full(self._entries.used, NEVER, np.int32)  # none was released: entries are 0 .. used - 1
        for number in range(len(self._starts) - 2, -1, -1):
            part = self._read(number)
            _scan(part, self._upcoming, number)
            self.file.seek(self._starts[number] * 4)
            self.file.write(part.data)
        self.file.flush()

    def first_uses(self, keys: np.ndarray) -> np.ndarray:
        if self._entries is None:
            raise RuntimeError("the second pass has begun: ask for first uses before it")
        known = self._entries.used
        found, _ = self._entries.enter(keys, len(self._starts))
        out = np.full(len(keys), NEVER, np.int32)
        out[found < known] = self._upcoming[found[found < known]]
        return out

    def next_uses(self, number: int) -> np.ndarray:
        self._entries, self._upcoming = None, self._upcoming[:0]  # the file knows the rest
        return self._read(number)

    def _read(self, number: int) -> np.ndarray:
        self.file.seek(self._starts[number] * 4)
        part = np.empty(self._starts[number + 1] - self._starts[number], np.int32)
        if self.file.readinto(part.data) != part.nbytes:
            raise OSError(f"the spool of the epoch is truncated at batch {number}: is the temporary folder full?")
        return part


def _digest(keys: list[np.ndarray]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in keys:
        digest.update(np.int64(len(part)).tobytes())
        digest.update(np.ascontiguousarray(part).data)
    return digest.digest()


@njit(nogil=True, cache=True)
def _scan(part, upcoming, number):
    """Replace each entry by its next use, seen from the end of the epoch."""
    for i in range(len(part)):
        entry = part[i]
        part[i] = upcoming[entry]
        upcoming[entry] = number
