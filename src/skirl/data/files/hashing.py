"""From the value of an id to a fingerprint of 64 bits, and from that to a row."""

import zlib

import numpy as np

from skirl.core.initial import _MIX1, _MIX2, mix
from skirl.data.skew import GOLDEN, fold
from skirl.tools.jit import kernel

BY_HASH, BY_OPEN = "by hash", "by an open vocabulary"
"""How ids become rows, as a stream's state says it and an export reads it."""

_SALT = 0x736B69726C6461
_S8, _S32 = np.uint64(8), np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ONE, _FOUR, _FIFTEEN = np.uint64(1), np.uint64(4), np.uint64(15)

_UNMIX1, _UNMIX2 = (np.uint64(pow(int(factor), -1, 1 << 64)) for factor in (_MIX1, _MIX2))
"""What undoes the two multiplications of `mix`."""

GOOD, BAD, NONE = 0, 1, 2
"""What a value is: good, malformed, missing."""


def seed_of(table: str) -> np.uint64:
    """The seed of a table's hash: a function of its name.

    >>> int(seed_of("C1")) != int(seed_of("C2"))
    True
    """
    raw = table.encode()
    return np.uint64(((zlib.crc32(raw) << 32) | zlib.crc32(raw, 0x5EED)) ^ _SALT)


@kernel
def hash_numbers(values, seed, out):
    """Fingerprints of int64 numbers; 0 is not one of them."""
    for i in range(values.size):
        mixed = mix(np.uint64(values[i]) ^ seed)
        out[i] = mixed if mixed != 0 else _ONE


def numbers_of(fingerprints: np.ndarray, seed: np.uint64) -> np.ndarray:
    """The int64 numbers that have these uint64 fingerprints: the hash of numbers is a bijection.

    >>> out = np.empty(3, np.uint64)
    >>> hash_numbers(np.array([7, -1, 2**62]), seed_of("C1"), out)
    >>> numbers_of(out, seed_of("C1")).tolist() == [7, -1, 2**62]
    True
    """
    z = _unshifted(fingerprints, 31) * _UNMIX2
    z = _unshifted(z, 27) * _UNMIX1
    return (_unshifted(z, 30) ^ seed).view(np.int64)


def _unshifted(z: np.ndarray, by: int) -> np.ndarray:
    """x of z = x ^ (x >> by), by above 64 / 3."""
    return z ^ (z >> np.uint64(by)) ^ (z >> np.uint64(2 * by))  # 3 * by is beyond 64


@kernel
def hash_texts(offsets, data, seed, out):
    """Fingerprints of texts: bytes data[offsets[i]:offsets[i + 1]], words of 8 bytes little-endian, the last one padded."""
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
    """Hexadecimal numbers of 1 to 16 digits, as the bits of an int64. kind[i]: whether one was there, changed to BAD."""
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
"""The value of each byte as a hexadecimal digit, 16 where it is none."""


@kernel
def rows_by_hash(fingerprints, kind, rows, out):
    """Rows 1 .. rows - 1 of fingerprints, row 0 where a value is missing; at most 2**48 rows."""
    places = np.uint64(rows - 1)
    if places <= _LOW:
        for i in range(out.size):
            row = ((fingerprints[i] >> _S32) * places) >> _S32
            out[i] = 0 if kind[i] == NONE else np.int64(row) + 1
    else:  # the same product of 64 and 64 bits, its upper half only: in halves
        high = places >> _S32
        for i in range(out.size):
            a, b = fingerprints[i] >> _S32, fingerprints[i] & _LOW
            cross = a * (places & _LOW) + ((b * (places & _LOW)) >> _S32)
            more = b * high + (cross & _LOW)
            row = a * high + (cross >> _S32) + (more >> _S32)
            out[i] = 0 if kind[i] == NONE else np.int64(row) + 1
