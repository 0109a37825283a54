"""List which rows a store holds: as keys, or as one bit per row of a table where that takes fewer bytes."""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from skirl.core.keys import row_of, table_of
from skirl.store.base import Store

MOST = 128 << 20
"""Most bytes of the bits of one table. Beyond that, its keys are listed."""


def held_bits(
    store: Store, rows: Mapping[int, int] | None
) -> Iterator[NDArray[np.int64] | tuple[int, NDArray[np.uint64]]]:
    """Yield which rows are held, as `Store.held` does."""
    if rows is None:
        yield from store.keys()
        return
    counts = np.zeros(max(store.layout.records) + 1, np.int64)
    for keys in store.keys():  # noqa: SIM118
        counts += np.bincount(table_of(keys), minlength=len(counts))
    words = {t: np.zeros(-(-n // 64), np.uint64) for t, n in rows.items() if n // 8 < min(8 * counts[t], MOST)}
    packed = np.isin(np.arange(len(counts)), list(words))
    for keys in store.keys():  # noqa: SIM118
        tables = table_of(keys)
        for table in np.unique(tables[packed[tables]]).tolist():
            at = row_of(keys[tables == table])
            np.bitwise_or.at(words[table], at >> 6, np.uint64(1) << (at & 63).astype(np.uint64))
        if (others := keys[~packed[tables]]).size:
            yield others
    yield from words.items()
