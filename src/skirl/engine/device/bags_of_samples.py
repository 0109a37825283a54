"""Layout of bags that samples share, for a device: the ids of each row of the output, and the samples of each bag."""

import numpy as np

from skirl.core.ids import BankIds
from skirl.tools.jit import kernel

LAID = ("begin", "end", "copy", "copy_to", "fold", "fold_begin")


def laid_out(ids: BankIds) -> dict[str, np.ndarray]:
    """Lay out the bags of a bank whose samples share some, for pooling and summing. All are pooled as they lie, one row
    of the output after the other, then bags are copied to samples. Gradients are summed in the same way, by bag.

    `begin`, `end`: the positions of each row of the output; none for a sample whose bag is shared. `copy`, `copy_to`:
    the bag and the row of each sample and shared feature. `fold`: the rows of each bag's samples, ascending;
    `fold_begin`, [bags + 1]: where they begin.
    """
    shared = ids.folded
    assert shared is not None
    begin, end = np.zeros((2, shared.rows), np.int32)
    each = shared.bag.size
    copy_to, fold, fold_begin = np.empty(each, np.int32), np.empty(each, np.int32), np.empty(shared.bags + 1, np.int32)
    _lay(ids.offsets, shared.first, shared.plain, shared.batch, begin, end)
    _group(shared.bag, shared.columns, shared.features, copy_to, fold_begin, fold)
    copy = np.ascontiguousarray(shared.bag).reshape(-1)
    return dict(zip(LAID, (begin, end, copy, copy_to, fold, fold_begin), strict=True))


@kernel
def _lay(offsets, first, plain, batch, begin, end):
    """Write each row's positions. Shared bags come after the samples' rows."""
    features = len(plain)
    behind = batch * features
    for f in range(features):
        for b in range(first[f + 1] - first[f]):
            row = b * features + f
            if not plain[f]:
                row = behind
                behind += 1
            begin[row], end[row] = offsets[first[f] + b], offsets[first[f] + b + 1]


@kernel
def _group(bag, columns, features, row_of, begin, rows):
    """Write the row of each sample and shared feature, and these rows by bag: a counting sort."""
    begin[:] = 0
    samples, shared = bag.shape
    for sample in range(samples):
        for i in range(shared):
            row_of[sample * shared + i] = sample * features + columns[i]
            begin[bag[sample, i] + 1] += 1
    for b in range(1, len(begin)):
        begin[b] += begin[b - 1]
    at = begin[:-1].copy()
    for sample in range(samples):
        for i in range(shared):
            b = bag[sample, i]
            rows[at[b]] = sample * features + columns[i]
            at[b] += 1
