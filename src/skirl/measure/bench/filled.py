"""A checkpoint with gigabytes of rows, for runs that need them from the beginning."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from skirl.core.keys import ROW_BITS

_PIECE = 1 << 18


def fill(flags: Mapping[str, Any], gigabytes: float, folder: Path) -> dict[str, Any]:
    """Save the checkpoint and return further flags for `skirl train`: the tables' scale, and where to begin.

    **Arguments**

    - `flags`: those of `skirl train`.
    - `gigabytes`: the size of all rows with their state; the tables are never made smaller than without.
    - `folder`: where the checkpoint goes.
    """
    from skirl.checkpoint import save
    from skirl.peers.base import Alone
    from skirl.peers.job import using
    from skirl.train.commands import Train

    def recipe_of(scale: float) -> Any:
        return Train.of(**dict(flags) | {"rows_scale": scale}).recipe

    with using(Alone()):
        rows = recipe_of(1.0).embeddings(1)
        (bank,) = range(len(rows.engine.widths))
        record = rows.engine.widths[bank] * rows.engine.dtype.itemsize
        scale = max(1.0, gigabytes * 1e9 / (record * sum(table.rows for table in rows.engine.schema.tables)))
        rows.close()
        rows = recipe_of(scale).embeddings(1)
    engine = rows.engine
    for number, table in enumerate(engine.schema.tables):
        for start in range(0, table.rows, _PIECE):
            keys = np.arange(start, min(table.rows, start + _PIECE)) | (number << ROW_BITS)
            engine.store.write(keys, np.full((len(keys), engine.widths[bank]), 0.01, engine.dtype))
            engine.seen.add(keys)
    engine.store.flush()
    save(folder, model=rows)
    rows.close()
    return {"rows_scale": scale, "from_": folder}
