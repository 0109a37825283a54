"""Writes a trace for `skirl bench traffic`: a 1-D .npy of int64 ids, out of a public trace or out of a Zipf distribution.

    python benchmarks/make_trace.py convert traces/scarab_first_half.i64be.xz scarab.npy
    python benchmarks/make_trace.py zipf zipf.npy --accesses 4096000 --rows 1000000 --exponent 1.05 --seed 0

A raw trace is ids without a header; its name says how they are stored: .i64be is int64, big-endian, .i32le int32,
little-endian, then .xz, .bz2, .gz or nothing. One reader by name takes 20 lines; a format of our own would need a
converter a trace.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import lzma
import re
from pathlib import Path

import numpy as np

OPEN = {".xz": lzma.open, ".bz2": bz2.open, ".gz": gzip.open, "": open}


def decode(path: Path) -> np.ndarray:
    """The ids of a raw trace, as int64."""
    match = re.search(r"\.([iu])(8|16|32|64)([bl])e(\.xz|\.bz2|\.gz|)$", path.name)
    if not match:
        raise ValueError(
            f"{path.name}: the name must end like .i64be.xz or .i32le.bz2 to say how ids are stored; rename it"
        )
    kind, bits, order, packing = match.groups()
    stored = np.dtype(f"{'>' if order == 'b' else '<'}{kind}{int(bits) // 8}")
    with OPEN[packing](path, "rb") as file:
        data = file.read()
    if len(data) % stored.itemsize:
        raise ValueError(
            f"{path.name}: {len(data)} bytes are no whole number of {stored.itemsize}-byte ids: download it anew"
        )
    ids = np.frombuffer(data, stored)
    if kind == "u" and bits == "64" and len(ids) and ids.max() >= 1 << 63:
        raise ValueError(f"{path.name}: ids reach {ids.max()}, an int64 holds less than 2**63; renumber them first")
    return ids.astype(np.int64)


def zipf(accesses: int, rows: int, exponent: float, seed: int) -> np.ndarray:
    """Ids 0 .. rows - 1, each access drawn by itself: id i with a chance of 1 / (i + 1) ** exponent of the sum."""
    mass = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    draws = np.random.default_rng(seed).random(accesses) * mass[-1]
    return np.minimum(np.searchsorted(mass, draws, side="right"), rows - 1).astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    convert = commands.add_parser("convert", help="decode a raw trace")
    convert.add_argument("raw", type=Path)
    convert.add_argument("out", type=Path)
    draw = commands.add_parser("zipf", help="draw a trace")
    draw.add_argument("out", type=Path)
    draw.add_argument("--accesses", type=int, required=True)
    draw.add_argument("--rows", type=int, required=True)
    draw.add_argument("--exponent", type=float, default=1.05)
    draw.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    ids = decode(args.raw) if args.command == "convert" else zipf(args.accesses, args.rows, args.exponent, args.seed)
    np.save(args.out, ids)
    print(f"{args.out}: {len(ids):,} accesses, {len(np.unique(ids)):,} distinct ids")


if __name__ == "__main__":
    main()
