"""A 128-bit hash of each row, from its labels, numbers, ids and lists by name, independent of their order and layout."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from skirl.core.initial import mix
from skirl.data.files.columns import floats_of, is_text, kinds_of, plain, texts_of
from skirl.data.files.encoded import Encoded
from skirl.data.files.hashing import NONE, hash_texts, seed_of
from skirl.data.files.session_order import session_numbers
from skirl.data.files.times import is_date, seconds_of
from skirl.tools.jit import kernel

_GOLDEN, _MIX, _MORE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_OTHER = np.uint64(0xD1B54A32D192ED03)
_S29, _S32 = np.uint64(29), np.uint64(32)


def row_hashes(rows: Encoded, labels: Sequence[str], dense: Sequence[str], ids: Sequence[str]) -> np.ndarray:
    """Return a hash of each row (uint64 [n, 2]): of its features, and of the kept columns, taken as session and time.

    **Arguments**

    - `rows`: the rows, with fingerprints as ids, or with rows of a table on both sides of a comparison.
    - `labels`, `dense`, `ids`: names of the columns of `rows`, in order.
    """
    out = np.zeros((len(rows), 2), np.uint64)
    for names, columns in ((labels, rows.labels), (dense, rows.dense)):
        for k, name in enumerate(names):
            _add_numbers(np.ascontiguousarray(columns[:, k]).view(np.int32), _seed("number", name), out)
    for f, (name, values, lengths) in enumerate(zip(ids, rows.ids, rows.lengths, strict=True)):
        if lengths is None:
            _add_numbers(values, _seed("id", name), out)
        elif (inverse := rows.inverse(f)) is None:
            _add_lists(values, lengths, _seed("id", name), out)
        else:
            values, lengths = rows.apart(f)
            assert lengths is not None
            lists = np.zeros((len(lengths), 2), np.uint64)
            _add_lists(values, lengths, _seed("id", name), lists)
            out += lists[inverse]
    for place, column in enumerate(rows.kept):
        hashes = session_hashes(column) if place == 0 else time_bits(column)[:, None].repeat(2, 1)
        for lane in range(2):
            _add_lane(np.ascontiguousarray(hashes[:, lane]), _seed("kept", f"{place} {lane}"), out[:, lane])
    _finish(out)
    return out


def session_hashes(column: Any) -> np.ndarray:
    """Return hashes of texts or numbers (uint64 [n, 2]). Equal values have equal hashes, however a file stores them."""
    column = plain(column, ())
    out = np.empty((len(column), 2), np.uint64)
    if is_text(column.type):
        for lane, seed in enumerate(_LANES):
            of = np.empty(len(column), np.uint64)
            hash_texts(*texts_of(column), seed, of)
            out[:, lane] = of
        kinds = kinds_of(column)
    else:
        values, kinds = session_numbers(column)
        for lane, seed in enumerate(_LANES):
            out[:, lane] = 0
            _add_lane(np.ascontiguousarray(values).view(np.uint64), seed, out[:, lane])
    out[kinds == NONE] = 0
    return out


def time_bits(column: Any) -> np.ndarray:
    """Return the bits of numbers, or of the seconds of dates, as float64 (uint64 [n])."""
    column = plain(column, ())
    values, kinds = seconds_of(column) if is_date(column.type) else floats_of(column, False)
    bits = np.ascontiguousarray(values, np.float64).view(np.uint64).copy()
    bits[kinds == NONE] = _OTHER
    return bits


def _seed(kind: str, name: str) -> np.uint64:
    return seed_of(f"{kind} {name}")


_LANES = (seed_of("session 0"), seed_of("session 1"))


@kernel
def _add_numbers(values, seed, out):
    """Add the hash of a number to each row's two sums."""
    for i in range(values.size):
        z = mix(np.uint64(values[i]) ^ seed)
        out[i, 0] += z
        out[i, 1] += mix(z ^ _OTHER)


@kernel
def _add_lane(values, seed, out):
    """Add the hash of a number to one of each row's two sums."""
    for i in range(values.size):
        out[i] += mix(values[i] ^ seed)


@kernel
def _add_lists(values, lengths, seed, out):
    """Add the hash of a list to each row's two sums: of its ids, each mixed with its position, and of its length."""
    at = 0
    for i in range(lengths.size):
        a, b, place = np.uint64(lengths[i]), seed, seed
        for k in range(at, at + lengths[i]):
            place += _GOLDEN
            z = (np.uint64(values[k]) ^ place) * _MIX
            z ^= z >> _S32
            a += z * _MORE
            b += (z ^ (z >> _S29)) * _OTHER
        at += lengths[i]
        a = mix(a ^ seed)
        out[i, 0] += a
        out[i, 1] += mix(b ^ a)


@kernel
def _finish(out):
    """Turn sums into hashes. Without this, rows that swap a value would leave the sum over all rows unchanged."""
    for i in range(out.shape[0]):
        a, b = out[i, 0], out[i, 1]
        out[i, 0] = mix(a ^ (b * _GOLDEN))
        out[i, 1] = mix(b ^ (a * _MORE))
