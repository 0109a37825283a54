"""The kernels of planning: link a batch's uses when it enters; move rows out and in and hand slots on when it is planned."""

from typing import NamedTuple

import numpy as np

from skirl.core.keys import MAX_ROWS, ROW_BITS
from skirl.oracle.row_states import EVICTED
from skirl.tools.jit import AHEAD, kernel, prefetch

NEVER = np.int32(2**31 - 1)
"""Marks a row without a next use in the window."""


class Slots(NamedTuple):
    row: np.ndarray
    """int64 [slots]: a row's key. For a hashed row, it has the row's handle in the low bits instead of the row number."""
    next: np.ndarray
    """int32 [slots]: the row's next use in the window, or -1."""
    free: np.ndarray
    """int32 [slots]: a stack of free slots."""


class Moves(NamedTuple):
    """Where missing rows come from, as in a Step: int64 and int32 by turns."""

    fetch_keys: np.ndarray
    fetch_slots: np.ndarray
    forward_keys: np.ndarray
    forward_slots: np.ndarray
    new_keys: np.ndarray
    new_slots: np.ndarray
    from_step: np.ndarray
    from_index: np.ndarray


class Held(NamedTuple):
    """The latest steps whose evictions are known."""

    steps: np.ndarray
    """int64 [steps, 3]: number, number of the first eviction, and where its keys begin; in the last line, of the next."""
    keys: np.ndarray


@kernel
def link(tables, rows, found, low, first, place, uses, state, cache, called, alone):
    """Write a batch's uses, from `place` on, and link each to the row's previous use. Handles of rows outside of small
    tables are there already. `called` gets the slots of resident rows that the window did not use before. Return how many
    these are, and how many rows are new to the window. Scratch: state [uses]. `alone`: the window has this batch only, and
    no row ever leaves, so the rows' states stay."""
    base, handle, after, slot = rows.base, uses.handle, uses.next, uses.slot
    n_called = fresh = 0
    for t in range(len(tables)):
        start, n = first[t], first[t + 1] - first[t]
        mine = handle[place + start : place + start + n]
        if base[tables[t]] >= 0:
            states, of, shift = rows.dense, low[t], base[tables[t]]
            for i in range(n):
                mine[i] = shift + found[of + i]
        else:
            states = rows.hashed
        for i in range(n):
            prefetch(states, mine[min(i + AHEAD, n - 1)])
            before = states[mine[i]]
            state[start + i] = before
            if not alone:
                states[mine[i]] = place + start + i + 1
                prefetch(after, max(before - 1, 0))
        for i in range(n):
            p = place + start + i
            before = state[start + i]
            after[p] = -1
            if before > 0:
                after[before - 1] = p
                slot[p] = -1
            else:
                fresh += 1
                slot[p] = before
                if before == 0:
                    slot[p] = -1
                elif before >= -EVICTED:
                    s = -1 - before
                    slot[p] = s
                    if not alone:
                        cache.next[s] = p
                        called[n_called] = s
                        n_called += 1
    return n_called, fresh


@kernel
def scan(tables, rows, first, place, uses, keys, missing, counts):
    """Write the keys of a batch's rows, and which of its uses have no slot, in each table's stretch of `missing`.
    counts [tables]: how many uses have no slot."""
    base, entry_key, handle, slot = rows.base, rows.key, uses.handle, uses.slot
    for t in range(len(tables)):
        high = np.int64(tables[t]) << ROW_BITS
        shift = base[tables[t]]
        n = first[t]
        for i in range(first[t], first[t + 1]):
            if shift >= 0:
                keys[i] = high + (handle[place + i] - shift)
            else:
                prefetch(entry_key, handle[place + min(i + AHEAD, first[t + 1] - 1)])
                keys[i] = entry_key[handle[place + i]]
            missing[n] = i
            n += slot[place + i] < 0
        counts[t] = n - first[t]


@kernel
def leave(victims, number, rows, uses, cache, n_free, keys):
    """Take rows out of the cache. `number` is that of the first of these evictions."""
    base, entry_key, slot_row, slot_next = rows.base, rows.key, cache.row, cache.next
    n = len(victims)
    for i in range(n):
        prefetch(slot_row, victims[min(i + 2 * AHEAD, n - 1)])
        prefetch(slot_next, victims[min(i + 2 * AHEAD, n - 1)])
        far = slot_row[victims[min(i + AHEAD, n - 1)]]
        table, low = far >> ROW_BITS, far & (MAX_ROWS - 1)
        if base[table] < 0:
            prefetch(entry_key, low)
        s = victims[i]
        cache.free[n_free + i] = s
        row, p = slot_row[s], slot_next[s]
        table, low = row >> ROW_BITS, row & (MAX_ROWS - 1)
        state = -EVICTED - 1 - ((number + i) & (EVICTED - 1))
        is_hashed = base[table] < 0
        keys[i] = entry_key[low] if is_hashed else row
        if p >= 0:
            uses.slot[p] = state
        elif is_hashed:
            rows.hashed[low] = state
        else:
            rows.dense[base[table] + low] = state


@kernel
def arrive(
    tables, rows, first, counts, missing, place, uses, keys, cache, n_free, bits, base, existed, held, hold_from, long_ago,
    moves,
):  # fmt: skip
    """Give each missing row a slot and a source, in the order of the batch. bits, base: those of `Seen`; existed
    [uses]: whether a row that it keeps in its set exists. Return how many rows are fetched, forwarded and new, and the
    step whose write-back fetches wait for."""
    handle, slot, slot_row, free, steps = uses.handle, uses.slot, cache.row, cache.free, held.steps
    fetch_keys, fetch_slots, new_keys, new_slots = moves.fetch_keys, moves.fetch_slots, moves.new_keys, moves.new_slots
    f = w = n = 0
    after = np.int64(-1)
    last = len(steps) - 1
    following = steps[last, 1]
    one = np.uint64(1)
    for t in range(len(counts)):
        high = np.int64(tables[t]) << ROW_BITS
        keyed = rows.base[tables[t]] >= 0
        words = base[tables[t]]
        end = first[t] + counts[t]
        for j in range(first[t], end):
            i = missing[j]
            p = place + i
            key = keys[i]
            far = missing[min(j + AHEAD, end - 1)]
            if words >= 0:
                prefetch(bits, words + ((keys[far] & (MAX_ROWS - 1)) >> 6))
            prefetch(slot_row, free[max(n_free - AHEAD, 0)])
            before = slot[p]
            n_free -= 1
            s = free[n_free]
            slot[p] = s
            slot_row[s] = key if keyed else high | handle[p]
            if before == -1:  # never evicted, or that was forgotten: the bit of `Seen` tells
                row = key & (MAX_ROWS - 1)
                if words >= 0:
                    word, bit = words + (row >> 6), one << np.uint64(row & 63)
                    known = bits[word]
                    had = (known & bit) != np.uint64(0)
                    bits[word] = known | bit
                else:
                    had = existed[i]
                if not had:
                    new_keys[n], new_slots[n] = key, s
                    n += 1
                    continue
                left = long_ago
            else:
                # Evictions are numbered modulo EVICTED, and states of rows in the array may be old: the key decides.
                age = (following - (-before - EVICTED - 1)) & (EVICTED - 1)
                k = last - 1
                while k >= 0 and ((following - steps[k, 1]) & (EVICTED - 1)) < age:
                    k -= 1
                index = ((following - steps[k, 1]) & (EVICTED - 1)) - age if k >= 0 else np.int64(-1)
                there = k >= 0 and held.keys[steps[k, 2] + index] == key
                left = steps[k, 0] if there else long_ago
                if left >= hold_from:
                    moves.forward_keys[w], moves.forward_slots[w] = key, s
                    moves.from_step[w] = left
                    moves.from_index[w] = index
                    w += 1
                    continue
            fetch_keys[f], fetch_slots[f] = key, s
            f += 1
            after = max(after, left)
    return f, w, n, after


@kernel
def use(first, place, uses, cache, slots, next_uses, lasts, counts):
    """Hand every row's slot on to its next use. Out: slots, that of each row; next_uses, the number of the next batch that
    uses it; and as in `scan`, lasts and counts, the rows without a next use."""
    after, slot, slot_next = uses.next, uses.slot, cache.next
    for t in range(len(counts)):
        start, end = first[t], first[t + 1]
        last = start
        for i in range(start, end):
            p, far = place + i, place + min(i + AHEAD, end - 1)
            prefetch(slot, max(after[far], 0))
            prefetch(slot_next, slot[far])
            s, q = slot[p], after[p]
            slots[i] = s
            slot_next[s] = q
            lasts[last] = i
            last += q < 0
            if q >= 0:
                slot[q] = s
                next_uses[i] = uses.batch[q >> uses.bits]
            else:
                next_uses[i] = NEVER
        counts[t] = last - start


@kernel
def rest(tables, rows, first, counts, which, place, uses, slots):
    """Put the slots of some rows in their states: in each table's stretch of `which`, as many as `counts` says."""
    handle = uses.handle
    for t in range(len(tables)):
        states = rows.dense if rows.base[tables[t]] >= 0 else rows.hashed
        end = first[t] + counts[t]
        for j in range(first[t], end):
            prefetch(states, handle[place + which[min(j + AHEAD, end - 1)]])
            i = which[j]
            states[handle[place + i]] = -1 - slots[i]


@kernel
def last_uses(tables, rows, first, place, uses, out):
    """Write the number of the last batch in the window that uses each row of a batch."""
    for t in range(len(tables)):
        states = rows.dense if rows.base[tables[t]] >= 0 else rows.hashed
        for i in range(first[t], first[t + 1]):
            out[i] = uses.batch[(states[uses.handle[place + i]] - 1) >> uses.bits]


@kernel
def group(parts, first_part, at, first, row_of, rows, slots, start, pos):
    """Write the slot of every position, and the positions of every row, by a counting sort within each table."""
    for t in range(len(at) - 1):
        mine, counts = rows[first[t] : first[t + 1]], start[first[t] : first[t + 1]]
        for i in range(len(counts)):
            counts[i] = 0
        for part in range(first_part[t], first_part[t + 1]):
            begin = parts[part, 3]
            of = row_of[begin : begin + parts[part, 1] - parts[part, 0]]
            for p in range(len(of)):
                counts[of[p]] += 1
        n = at[t]
        for i in range(len(counts)):
            n += counts[i]
            counts[i] = n
        # From the end: each row's positions fill its range downwards, which leaves `start` at its beginning.
        for part in range(first_part[t + 1] - 1, first_part[t] - 1, -1):
            begin = parts[part, 3]
            end = begin + parts[part, 1] - parts[part, 0]
            of, out = row_of[begin:end], slots[begin:end]
            for p in range(len(of) - 1, -1, -1):
                i = of[p]
                out[p] = mine[i]
                n = counts[i] - 1
                counts[i] = n
                pos[n] = begin + p
    start[-1] = at[-1]
