"""Hashes the value of an id to a fingerprint of 64 bits, and that to a row; and random streams, which are hashes too."""

import zlib

import numpy as np

from skirl.core.initial import _MIX1, _MIX2, mix
from skirl.tools.jit import kernel

BY_HASH, BY_OPEN = "by hash", "by an open vocabulary"
"""How ids become rows, as a stream's state stores it and an export reads it."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SALT = 0x736B69726C6461
_S8, _S32 = np.uint64(8), np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ONE, _FOUR, _FIFTEEN = np.uint64(1), np.uint64(4), np.uint64(15)

_UNMIX1, _UNMIX2 = (np.uint64(pow(int(factor), -1, 1 << 64)) for factor in (_MIX1, _MIX2))
"""Factors that undo the two multiplications of `mix`."""

GOOD, BAD, NONE = 0, 1, 2
"""Kinds of values: good, malformed, missing."""


@kernel
def fold(state, word):
    """The state of a random stream whose name has one more word."""
    return mix((state ^ word) + GOLDEN)


def named(*words: int | np.uint64) -> np.uint64:
    stream = np.uint64(0)
    for word in words:
        stream = np.uint64(fold(stream, np.uint64(int(word) % 2**64)))  # a compiled function returns a plain int
    return stream


@kernel
def unit(stream, i):
    """Draw i of a stream: a float64 in [0, 1) with 53 random bits."""
    return np.float64(mix(stream + i * GOLDEN) >> np.uint64(11)) * 2.0**-53


def seed_of(table: str) -> np.uint64:
    """The seed of a table's hash depends only on its name."""
    raw = table.encode()
    return np.uint64(((zlib.crc32(raw) << 32) | zlib.crc32(raw, 0x5EED)) ^ _SALT)


@kernel
def hash_numbers(values, seed, out):
    """Fill `out` with the fingerprints of int64 numbers. None of them is 0."""
    for i in range(values.size):
        mixed = mix(np.uint64(values[i]) ^ seed)
        out[i] = mixed if mixed != 0 else _ONE


def numbers_of(fingerprints: np.ndarray, seed: np.uint64) -> np.ndarray:
    """The int64 numbers that have these uint64 fingerprints: the hash of numbers is a bijection."""
    z = _unshifted(fingerprints, 31) * _UNMIX2
    z = _unshifted(z, 27) * _UNMIX1
    return (_unshifted(z, 30) ^ seed).view(np.int64)


def _unshifted(z: np.ndarray, by: int) -> np.ndarray:
    """The x of z = x ^ (x >> by), for `by` above 64 / 3."""
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


DIGITS = np.full(256, 16, np.uint8)
"""The value of each byte as a hexadecimal digit; 16 for all other bytes."""
DIGITS[[*b"0123456789abcdefABCDEF"]] = [*range(16), *range(10, 16)]


@kernel
def rows_by_hash(fingerprints, rows, out):
    """Fill `out` with rows 1 .. rows - 1 for fingerprints, and row 0 for 0, a missing value; at most 2**48 rows."""
    places = np.uint64(rows - 1)
    if places <= _LOW:
        for i in range(out.size):
            row = ((fingerprints[i] >> _S32) * places) >> _S32
            out[i] = 0 if fingerprints[i] == 0 else np.int64(row) + 1
    else:  # the upper 64 bits of a 64 x 64 bit product, from products of 32-bit halves
        high = places >> _S32
        for i in range(out.size):
            a, b = fingerprints[i] >> _S32, fingerprints[i] & _LOW
            cross = a * (places & _LOW) + ((b * (places & _LOW)) >> _S32)
            more = b * high + (cross & _LOW)
            row = a * high + (cross >> _S32) + (more >> _S32)
            out[i] = 0 if fingerprints[i] == 0 else np.int64(row) + 1
