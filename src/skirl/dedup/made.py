"""Rows of sessions for measurements: in order, shuffled, and as a service writes them in order of time."""

from typing import Any

import numpy as np
import pyarrow as pa

from skirl.data.files.hashing import hash_numbers, seed_of
from skirl.data.files.schema import FileSchema, Id, Label
from skirl.data.sessions import Sessions

SHIFTS = 0.5
"""How often a list shifts, in measurements of windows."""


def rows_of_sessions(samples: int, change: float, rows_scale: float, drift: Any = "redraw") -> tuple[Any, Any, Any]:
    """Rows of synthetic:sessions in order with fingerprints of 64 bits as ids, their schema, and where sessions begin.

    **Arguments**

    - `samples`: how many.
    - `change`: the probability that a list differs from that of the sample before.
    - `rows_scale`: multiplies the ids that samples are drawn from.
    - `drift`: what a change is.
    """
    data = Sessions(batch_size=samples, batches=1, change=change, rows_scale=rows_scale, drift=drift, once=False)
    batch = next(iter(data))
    sparse, columns = batch.sparse, {"label": pa.array(batch.labels.numpy())}
    for k in range(batch.dense.shape[1]):
        columns[f"dense_{k}"] = pa.array(batch.dense[:, k].contiguous().numpy())
    values, offsets = sparse.values().numpy(), sparse.offsets().numpy()
    ids = []
    for f, name in enumerate(sparse.keys()):
        own = offsets[f * samples : (f + 1) * samples + 1]
        prints = np.empty(own[-1] - own[0], np.uint64)
        hash_numbers(np.ascontiguousarray(values[own[0] : own[-1]]), seed_of(name), prints)
        column = pa.array(prints.view(np.int64))
        of_list = name in data.lists
        ids.append(Id(name, type="fingerprint", list=of_list))
        if of_list:
            column = pa.ListArray.from_arrays(pa.array((own - own[0]).astype(np.int32)), column)
        columns[name] = column
    users = columns["user"].to_numpy()
    new = np.ones(samples, bool)
    new[1:] = users[1:] != users[:-1]
    return pa.table(columns), FileSchema((Label("label"),), (), tuple(ids)), new


def in_time(new: np.ndarray, at_once: int, draw: np.random.Generator) -> np.ndarray:
    """The rows in order of time, each sample of a session after a random while.

    **Arguments**

    - `new`: where sessions begin.
    - `at_once`: how many sessions run at the same time.
    - `draw`: random numbers.
    """
    session = np.cumsum(new) - 1
    begins = draw.random(session[-1] + 1) * max(1, (session[-1] + 1) / at_once)
    times = begins[session] + draw.random(len(new))
    times = times[np.lexsort((times, session))]  # samples of a session stay in order
    return np.argsort(times, kind="stable")
