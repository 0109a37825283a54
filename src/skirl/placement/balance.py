"""Compiled loops that put items on ranks: greedily, then by moves and swaps. Fixed items stay where they are.

The sum of bytes over the caps counts first, then the time of the busiest rank."""

import numpy as np

from skirl.tools.jit import kernel

EPS = 1e-9
"""The least that a change has to gain, as a share of the busiest rank's time: less is rounding."""


@kernel
def greedy(order, compute, exchange, nbytes, fixed, slow, caps, at, load, used):
    """Put each item of `order` on the least busy rank that has room, or else on the one that is then least over.

    Item i has compute[i] and exchange[i] in ms, nbytes[i], and fixed[i] (its rank, or -1). Rank r multiplies what is
    computed by slow[r], and has room for caps[r] bytes. Out: `at`, the rank of each item, and the `load` in ms and `used`
    bytes of each rank.
    """
    load[:] = 0.0
    used[:] = 0
    for i in order:
        if fixed[i] >= 0:
            at[i] = fixed[i]
            load[at[i]] += compute[i] * slow[at[i]] + exchange[i]
            used[at[i]] += nbytes[i]
    for i in order:
        if fixed[i] >= 0:
            continue
        best, best_load, best_over = -1, 0.0, 0
        for r in range(len(caps)):
            over = max(0, used[r] + nbytes[i] - caps[r])
            busy = load[r] + compute[i] * slow[r] + exchange[i]
            if best < 0 or over < best_over or (over == best_over and busy < best_load):
                best, best_load, best_over = r, busy, over
        at[i] = best
        load[best] = best_load
        used[best] += nbytes[i]


@kernel
def _over(used, cap):
    return max(0, used - cap)


@kernel
def improve(compute, exchange, nbytes, fixed, slow, caps, at, load, used, most):
    """Move or swap items while that reduces the bytes over the caps or the busiest rank's time. Return how often.

    Each change, of at most `most`, is the best one for a single rank: the one most over its cap, or else the busiest.
    """
    ranks, done = len(caps), 0
    while done < most:
        worst, most_over = np.int64(-1), np.int64(0)  # no literals: `_change` would be compiled again for each
        for r in range(ranks):
            over = _over(used[r], caps[r])
            if over > most_over:
                worst, most_over = r, over
        tight = worst >= 0
        if not tight:
            worst = np.int64(0)
            for r in range(ranks):
                if load[r] > load[worst]:
                    worst = r
        changed = _change(worst, tight, compute, exchange, nbytes, fixed, slow, caps, at, load, used)
        if not changed and tight:  # the bytes over cannot shrink; the busiest rank's time still may
            worst = np.int64(0)
            for r in range(ranks):
                if load[r] > load[worst]:
                    worst = r
            tight = np.bool_(False)
            changed = _change(worst, tight, compute, exchange, nbytes, fixed, slow, caps, at, load, used)
        if not changed:
            break
        done += 1
    # The sums have drifted over many steps: add them up again.
    load[:] = 0.0
    for i in range(len(at)):
        load[at[i]] += compute[i] * slow[at[i]] + exchange[i]
    return done


@kernel
def _change(b, tight, compute, exchange, nbytes, fixed, slow, caps, at, load, used):
    """Make the best move or swap of an item of rank b, if it gains. Return whether one was made."""
    best_i, best_j, best_r = np.int64(-1), np.int64(-1), np.int64(-1)  # as above, for `_put`
    best_over, best_busy = 0, load[b] * (1 - EPS)
    over_b = _over(used[b], caps[b])
    if tight:
        best_over, best_busy = -1, np.inf  # the bytes over have to become fewer
    n, ranks = len(at), len(caps)
    for i in range(n):
        if at[i] != b or fixed[i] >= 0:
            continue
        ib = compute[i] * slow[b] + exchange[i]
        left_over = _over(used[b] - nbytes[i], caps[b]) - over_b
        for r in range(ranks):
            if r == b:
                continue
            over = left_over + _over(used[r] + nbytes[i], caps[r]) - _over(used[r], caps[r])
            if over > best_over:
                continue
            busy = max(load[b] - ib, load[r] + compute[i] * slow[r] + exchange[i])
            if over < best_over or busy < best_busy:
                if not tight and busy >= load[b] * (1 - EPS):
                    continue
                best_i, best_j, best_r, best_over, best_busy = i, -1, r, over, busy
        for j in range(n):
            r = at[j]
            if r == b or fixed[j] >= 0:
                continue
            more = nbytes[j] - nbytes[i]
            over = _over(used[b] + more, caps[b]) - over_b + _over(used[r] - more, caps[r]) - _over(used[r], caps[r])
            if over > best_over:
                continue
            jb = compute[j] * slow[b] + exchange[j]
            jr = compute[j] * slow[r] + exchange[j]
            busy = max(load[b] - ib + jb, load[r] - jr + compute[i] * slow[r] + exchange[i])
            if over < best_over or busy < best_busy:
                if not tight and busy >= load[b] * (1 - EPS):
                    continue
                best_i, best_j, best_r, best_over, best_busy = i, j, r, over, busy
    if best_i < 0:
        return False
    _put(best_i, best_r, compute, exchange, nbytes, slow, at, load, used)
    if best_j >= 0:
        _put(best_j, b, compute, exchange, nbytes, slow, at, load, used)
    return True


@kernel
def _put(i, r, compute, exchange, nbytes, slow, at, load, used):
    before = at[i]
    load[before] -= compute[i] * slow[before] + exchange[i]
    used[before] -= nbytes[i]
    at[i] = r
    load[r] += compute[i] * slow[r] + exchange[i]
    used[r] += nbytes[i]
