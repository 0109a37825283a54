"""The loops over bags that samples share: copy each to its samples, and sum the samples' gradients by bag."""

from skirl.tools.jit import kernel


@kernel
def expand(bags, bag, columns, features, out, lo, hi):
    """Copy bags to their samples, for samples lo..hi.

    - `bags`: [bags, dim], the pooled bags.
    - `bag`: int32 [batch, shared], the bag of each sample and each feature whose bags are shared.
    - `columns`: int32 [shared], the numbers of these features.
    - `out`: [batch * features, dim]; rows of other features stay as they are.
    """
    dim = bags.shape[1]
    for sample in range(lo, hi):
        for i in range(columns.size):
            b, row = bag[sample, i], sample * features + columns[i]
            for d in range(dim):
                out[row, d] = bags[b, d]


@kernel
def fold(grads, bag, columns, features, out, lo, hi):
    """Sum the gradients of samples by bag, for bags lo..hi: over the samples in ascending order, from 0.

    - `grads`: [batch * features, dim], the gradients of the samples' rows.
    - `out`: [bags, dim].
    """
    dim = grads.shape[1]
    zero = grads.dtype.type(0)
    for b in range(lo, hi):
        for d in range(dim):
            out[b, d] = zero
    for sample in range(bag.shape[0]):
        for i in range(columns.size):
            b = bag[sample, i]
            if lo <= b < hi:
                row = sample * features + columns[i]
                for d in range(dim):
                    out[b, d] = out[b, d] + grads[row, d]
