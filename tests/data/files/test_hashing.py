"""Fingerprints and rows compared with plain Python integers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skirl.data.files.hashing import BAD, DIGITS, GOOD, hash_numbers, hash_texts, parse_hex, rows_by_hash, seed_of
from tests.cases import cases
from tests.data import logs


def texts(values: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *map(len, values)]).astype(np.int32)
    return offsets, np.frombuffer(b"".join(values), np.uint8)


@given(values=st.lists(st.binary(max_size=30)), table=st.text(max_size=5))
@cases(100)
def test_texts(values: list[bytes], table: str) -> None:
    out = np.empty(len(values), np.uint64)
    hash_texts(*texts(values), seed_of(table), out)
    assert out.tolist() == [logs.text_hash(value, table) or 1 for value in values]


@given(values=st.lists(st.integers(-(2**63), 2**63 - 1)), table=st.text(max_size=5))
@cases(100)
def test_numbers(values: list[int], table: str) -> None:
    out = np.empty(len(values), np.uint64)
    hash_numbers(np.array(values, np.int64), seed_of(table), out)
    assert out.tolist() == [logs.number_hash(value, table) or 1 for value in values]


def test_zero_is_the_fingerprint_of_nothing() -> None:
    """The bijection maps one number to 0; its fingerprint is 1 instead."""
    out = np.empty(1, np.uint64)
    hash_numbers(seed_of("a").reshape(1).view(np.int64), seed_of("a"), out)
    assert logs.number_hash(int(seed_of("a")), "a") == 0 and out[0] == 1


@given(prints=st.lists(st.integers(0, 2**64 - 1), min_size=1), rows=st.integers(2, 2**48))
@cases(200)
def test_rows(prints: list[int], rows: int) -> None:
    out = np.empty(len(prints), np.int64)
    rows_by_hash(np.array(prints, np.uint64), rows, out)
    for row, value in zip(out.tolist(), prints):
        assert row == (logs.row_of(value, rows) if value else 0) < rows


@given(values=st.lists(st.one_of(st.text("0123456789abcdefABCDEF", max_size=18), st.text(max_size=4))))
@cases(100)
def test_hex(values: list[str]) -> None:
    out, kinds = np.empty(len(values), np.int64), np.zeros(len(values), np.uint8)
    parse_hex(*texts([value.encode() for value in values]), DIGITS, out, kinds)
    for value, number, kind in zip(values, out.tolist(), kinds):
        right = 0 < len(value) <= 16 and set(value) <= set("0123456789abcdefABCDEF")
        assert kind == (GOOD if right else BAD)
        assert not right or number % 2**64 == int(value, 16)
