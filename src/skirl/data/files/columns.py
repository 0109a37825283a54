"""Columns of files as Arrow gives them, and hashes of their values."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.types as pt

from skirl.core.initial import _MIX1, _MIX2, mix
from skirl.data.skew import GOLDEN, fold
from skirl.tools.jit import kernel, read_only

BY_HASH, BY_OPEN = "by hash", "by an open vocabulary"
"""How ids become rows, as a stream's state stores it and an export reads it."""

_SALT = 0x736B69726C6461
_S8, _S32 = np.uint64(8), np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ONE, _FOUR, _FIFTEEN = np.uint64(1), np.uint64(4), np.uint64(15)

_UNMIX1, _UNMIX2 = (np.uint64(pow(int(factor), -1, 1 << 64)) for factor in (_MIX1, _MIX2))
"""Factors that undo the two multiplications of `mix`."""

GOOD, BAD, NONE = 0, 1, 2
"""Kinds of values: good, malformed, missing."""


def seed_of(table: str) -> np.uint64:
    """Return the seed of a table's hash, which depends only on its name.

    >>> int(seed_of("C1")) != int(seed_of("C2"))
    True
    """
    raw = table.encode()
    return np.uint64(((zlib.crc32(raw) << 32) | zlib.crc32(raw, 0x5EED)) ^ _SALT)


@kernel
def hash_numbers(values, seed, out):
    """Fill `out` with the fingerprints of int64 numbers. None of them is 0."""
    for i in range(values.size):
        mixed = mix(np.uint64(values[i]) ^ seed)
        out[i] = mixed if mixed != 0 else _ONE


def numbers_of(fingerprints: np.ndarray, seed: np.uint64) -> np.ndarray:
    """Return the int64 numbers that have these uint64 fingerprints, which is possible as the hash of numbers is a bijection.

    >>> out = np.empty(3, np.uint64)
    >>> hash_numbers(np.array([7, -1, 2**62]), seed_of("C1"), out)
    >>> numbers_of(out, seed_of("C1")).tolist() == [7, -1, 2**62]
    True
    """
    z = _unshifted(fingerprints, 31) * _UNMIX2
    z = _unshifted(z, 27) * _UNMIX1
    return (_unshifted(z, 30) ^ seed).view(np.int64)


def _unshifted(z: np.ndarray, by: int) -> np.ndarray:
    """Return the x of z = x ^ (x >> by), for `by` above 64 / 3."""
    return z ^ (z >> np.uint64(by)) ^ (z >> np.uint64(2 * by))  # a shift by 3 * by would leave nothing


@kernel
def hash_texts(offsets, data, seed, out):
    """Fill `out` with the fingerprints of texts: bytes data[offsets[i]:offsets[i + 1]].

    They are hashed in little-endian words of 8 bytes, the last one padded with zeros.
    """
    for i in range(out.size):
        begin, end = offsets[i], offsets[i + 1]
        state = mix(seed ^ (np.uint64(end - begin) * GOLDEN))
        at = begin
        while at < end:
            word = np.uint64(0)
            for j in range(min(8, end - at)):
                word |= np.uint64(data[at + j]) << (_S8 * np.uint64(j))
            state = fold(state, word)
            at += 8
        out[i] = state if state != 0 else _ONE


@kernel
def parse_hex(offsets, data, digits, out, kind):
    """Parse hexadecimal numbers of 1 to 16 digits into the bits of int64. Sets kind[i] to BAD where a GOOD one is none."""
    for i in range(out.size):
        begin, end = offsets[i], offsets[i + 1]
        number, wrong = np.uint64(0), np.uint64(0)
        for at in range(begin, min(end, begin + 16)):
            digit = np.uint64(digits[data[at]])
            wrong |= digit
            number = (number << _FOUR) | (digit & _FIFTEEN)
        out[i] = np.int64(number)
        if kind[i] == GOOD and (wrong > _FIFTEEN or end == begin or end > begin + 16):
            kind[i] = BAD


def _digits() -> np.ndarray:
    table = np.full(256, 0x10, np.uint8)
    for value, digit in enumerate("0123456789abcdef"):
        table[ord(digit)] = table[ord(digit.upper())] = value
    return table


DIGITS = _digits()
"""The value of each byte as a hexadecimal digit; 16 for all other bytes."""


@kernel
def rows_by_hash(fingerprints, kind, rows, out):
    """Fill `out` with rows 1 .. rows - 1 for fingerprints, and row 0 for missing values; at most 2**48 rows.

    kind: the kind of each value; None if those with fingerprint 0 are missing, and no others.
    """
    places = np.uint64(rows - 1)
    if places <= _LOW:
        for i in range(out.size):
            row = ((fingerprints[i] >> _S32) * places) >> _S32
            out[i] = 0 if _is_missing(fingerprints, kind, i) else np.int64(row) + 1
    else:  # the upper 64 bits of a 64 x 64 bit product, from products of 32-bit halves
        high = places >> _S32
        for i in range(out.size):
            a, b = fingerprints[i] >> _S32, fingerprints[i] & _LOW
            cross = a * (places & _LOW) + ((b * (places & _LOW)) >> _S32)
            more = b * high + (cross & _LOW)
            row = a * high + (cross >> _S32) + (more >> _S32)
            out[i] = 0 if _is_missing(fingerprints, kind, i) else np.int64(row) + 1


@kernel
def _is_missing(fingerprints, kind, i):
    if kind is None:
        return fingerprints[i] == 0
    return kind[i] == NONE


pc: Any = pyarrow.compute
"""`Any`, because Arrow creates its functions at import, where type checkers do not see them."""
_NUMBER = r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,4})?$"
_WHOLE = r"^-?[0-9]{1,18}$"


def plain(column: Any, missing: Sequence[str]) -> pa.Array:
    """Return a column as one plain array: dictionaries decoded, 32-bit text offsets, and null for texts in `missing`."""
    column = one(column)
    if isinstance(column, pa.ChunkedArray):
        raise OverflowError("more than 2 GiB of text in one column of one row group")
    if pt.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type):
        if not (pt.is_string(column.type) or pt.is_binary(column.type)):
            column = column.cast(pa.binary())
        if not pt.is_string(column.type):
            column = pa.Array.from_buffers(pa.string(), len(column), column.buffers(), offset=column.offset)
        for text in missing:
            equal = pc.equal(column, text)
            if pc.any(equal).as_py():
                column = pc.if_else(equal, None, column)
    return column


def one(column: Any) -> Any:
    """Return a column as one array. Copies only if it has several chunks."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def is_text(kind: pa.DataType) -> bool:
    """Return whether values of this type are bytes or text."""
    tests = (pt.is_string, pt.is_large_string, pt.is_binary, pt.is_large_binary, pt.is_string_view, pt.is_binary_view)
    return any(test(kind) for test in tests)


def is_list(kind: pa.DataType) -> bool:
    """Return whether values of this type are lists."""
    return pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)


def is_number(kind: pa.DataType) -> bool:
    """Return whether values of this type are numbers that convert to float64 or int64."""
    return pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind) or pt.is_null(kind)


def kinds_of(column: pa.Array) -> np.ndarray:
    """Return uint8 [n]: GOOD, or NONE where a value is missing."""
    if column.null_count == 0:
        return np.zeros(len(column), np.uint8)
    if pt.is_null(column.type):
        return np.full(len(column), NONE, np.uint8)
    bits = np.frombuffer(column.buffers()[0], np.uint8)[column.offset // 8 :]
    begin = column.offset % 8
    valid = np.unpackbits(bits, count=begin + len(column), bitorder="little")[begin:]
    return (valid ^ 1) * np.uint8(NONE)


def texts_of(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets [n + 1] and the bytes of a text column, without copying."""
    _, offsets, data = column.buffers()
    if len(column) == 0 or offsets is None:
        return read_only(np.zeros(len(column) + 1, np.int32)), read_only(np.empty(0, np.uint8))
    view = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    text = np.empty(0, np.uint8) if data is None or data.size == 0 else np.frombuffer(data, np.uint8)
    return read_only(view), read_only(text)


def floats_of(column: pa.Array, nan_is_missing: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 [n] (float32 if stored so), and the kind of each value. Infinity is malformed, and so is NaN unless
    `nan_is_missing`."""
    kinds = kinds_of(column)
    if is_text(column.type):
        column = _cast(column, kinds, pa.float64(), _NUMBER)
    if not pt.is_float32(column.type) and not pt.is_float64(column.type):
        column = column.cast(pa.float64(), safe=False)  # rounds whole numbers beyond 2**53
    values = _numpy(column)
    finite = np.isfinite(values)
    if not finite.all():
        wrong = ~finite & (kinds == GOOD)  # the slot of a missing value may hold anything
        kinds[wrong] = BAD
        if nan_is_missing:
            kinds[wrong & np.isnan(values)] = NONE
    return values, kinds


def ints_of(column: pa.Array, nan_is_missing: bool, points: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return int64 [n], and the kind of each value. One that is not whole, or does not fit, is malformed.

    A uint64 keeps its bits. points: texts may be floats, "7.0" for 7.
    """
    kinds = kinds_of(column)
    if is_text(column.type):
        values = _numpy(_cast(column, kinds, pa.int64(), _WHOLE))
        if points and len(odd := np.flatnonzero(kinds == BAD)):
            floats, some = floats_of(column.take(pa.array(odd)), False)
            some[(some == GOOD) & ~_whole(floats)] = BAD
            values, kinds[odd] = values.copy(), some
            values[odd[some == GOOD]] = floats[some == GOOD].astype(np.int64)
        return values, kinds
    if pt.is_floating(column.type):
        floats = _numpy(column).astype(np.float64)
        whole = _whole(floats)
        wrong = ~whole & (kinds == GOOD)
        kinds[wrong] = BAD
        if nan_is_missing:
            kinds[wrong & np.isnan(floats)] = NONE
        return np.where(whole, floats, 0).astype(np.int64), kinds
    return numbers_in(column if pt.is_integer(column.type) else column.cast(pa.int64())), kinds


def numbers_in(column: pa.Array) -> np.ndarray:
    """Return the values of a column of whole numbers without copying. A uint64 keeps its bits; the slot of a missing value
    may hold anything."""
    values = _numpy(column)
    return values.view(np.int64) if pt.is_uint64(column.type) else values


def _whole(floats: np.ndarray) -> np.ndarray:
    return np.isfinite(floats) & (np.floor(floats) == floats) & (np.abs(floats) < 2.0**63)


def hex_of(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Parse hexadecimal texts. Return int64 [n], and the kind of each value."""
    kinds = kinds_of(column)
    offsets, data = texts_of(column)
    out = np.empty(len(column), np.int64)
    parse_hex(offsets, data, DIGITS, out, kinds)
    return out, kinds


def value_at(column: pa.Array, i: int) -> Any:
    """Return a value as Python has it, for an error message."""
    if is_text(column.type):
        if not column[i].is_valid:
            return None
        offsets, data = texts_of(column)
        return data[offsets[i] : offsets[i + 1]].tobytes()
    return column[i].as_py()


def _cast(column: pa.Array, kinds: np.ndarray, to: pa.DataType, good: str) -> pa.Array:
    """Parse texts as numbers. What Arrow's cast rejects is marked malformed in `kinds`, and null in the result."""
    x = pt.is_int64(to) and _has_x(column)  # Arrow would read 0x1f as 31
    try:
        if not x:
            return column.cast(to)
    except pa.ArrowInvalid:
        pass
    bytes_ = pa.Array.from_buffers(pa.binary(), len(column), column.buffers(), offset=column.offset)
    sure = pc.fill_null(pc.match_substring_regex(bytes_, good), False).to_numpy(zero_copy_only=False)
    sure = sure.copy()
    for i in np.flatnonzero(~sure & (kinds == GOOD)):  # few: they miss the pattern, but the cast may still accept them
        try:
            column.slice(i, 1).cast(to)
            sure[i] = not (x and _has_x(column.slice(i, 1)))
        except pa.ArrowInvalid:
            pass
        if not sure[i]:
            kinds[i] = BAD
    return pc.if_else(pa.array(sure), column, None).cast(to)


def _has_x(column: pa.Array) -> bool:
    offsets, data = texts_of(column)
    return bool(((data[offsets[0] : offsets[-1]] | 32) == ord("x")).any())


def _numpy(column: pa.Array) -> np.ndarray:
    """Return the numbers of a column, mostly without copying. The slot of a missing one may hold anything."""
    if pt.is_null(column.type):
        return np.zeros(len(column), np.float64)
    if pt.is_boolean(column.type) or pt.is_float16(column.type):
        return pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
    data = column.buffers()[1]
    if len(column) == 0 or data is None:
        return np.zeros(len(column), column.type.to_pandas_dtype())
    kind = np.dtype(column.type.to_pandas_dtype())
    return np.frombuffer(data, kind, len(column), column.offset * kind.itemsize)
