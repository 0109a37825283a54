"""Compares the same run by several trainers, with any number, cache, depth, store and timing, with the plain reference."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from skirl.core.placement import Placement
from skirl.core.tables import Schema
from skirl.train.fingerprints import Trace, compare, digest, rows_of
from skirl.train.flags import ShowFlags
from skirl.train.recipe import Recipe
from skirl.train.verify import in_plain_python
from skirl.train.verify_trainer import JOB, REFUSED, looks_of, recipe_of

DEPTHS = (1, 20, "auto")
STORES = ("memory", "disk")
PATIENCE = 1800.0


def verify_trainers(
    recipe: Recipe,
    sizes: Sequence[int],
    optimizers: Sequence[str],
    caches: Sequence[int],
    show: ShowFlags,
    stores: Sequence[Sequence[str]] = (STORES,),
) -> dict[str, Any]:
    """Train with each number of trainers and each cache, depth and store. Return the number of runs, and what differs."""
    started = time.monotonic()
    plain = replace(recipe, cache=replace(recipe.cache, depth=1, store="memory"))
    expected = {name: _with_digests(in_plain_python(recipe_of(plain, {"optimizer": name, "depth": 1}), show))
                for name in optimizers}  # fmt: skip
    schema, batches = Schema.of(recipe.tables()), list(recipe.in_steps())
    keys = [rows_of(batch, schema) for batch in batches]
    differences: list[str] = []
    fetched = done = 0
    for size, together in product(sizes, stores):
        cases = [
            {"optimizer": optimizer, "cache": cache, "depth": depth, "store": store}
            for optimizer, cache, depth, store in product(optimizers, caches, DEPTHS, together)
        ]
        # Owners need unequal parts of a batch's rows, so each gets its share of the cache and a tenth more.
        runs = [case | {"cache": -(-case["cache"] * 11 // (10 * size))} for case in cases]
        with tempfile.TemporaryDirectory(prefix="skirl-verify-") as folder:
            (Path(folder) / JOB).write_text(json.dumps({"flags": _flags(recipe), "runs": runs}))
            _run(size, Path(folder))
            for number, case in enumerate(cases):
                ours, moved = _joined(Path(folder), number, size, keys)
                fetched += moved
                reference = expected[case["optimizer"]]
                _leave_out(ours, reference, looks_of(case))
                found = compare(ours, reference, schema, batches)
                if found is not None:
                    said = ", ".join(f"{name} {value}" for name, value in case.items())
                    differences.append(f"{size} trainers, {said}: {found}")
        done += len(cases)
        if not show.quiet and not show.json:
            where = ", ".join(together)
            print(f"{size} trainers, {where}: {len(cases)} runs, {len(differences)} differences so far", flush=True)
    return {
        "trainers": list(sizes),
        "runs": done,
        "differences": len(differences),
        "first": differences[0] if differences else None,
        "fetched": fetched,
        "steps": len(batches),
        "seconds": time.monotonic() - started,
    }


def _flags(recipe: Recipe) -> dict[str, Any]:
    flags = recipe.flat()
    return {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}


def _with_digests(trace: Trace) -> Trace:
    """Return a trace with one digest per step for all dense weights."""
    return replace(trace, dense=[{"dense weights": digest(b"".join(step.values()))} for step in trace.dense])


def _joined(folder: Path, number: int, size: int, keys: list[np.ndarray]) -> tuple[Trace, int]:
    """Join the traces that all trainers saved of a run. Return it, and how many rows they fetched."""
    parts = [np.load(folder / f"{number}-{rank}.npz") for rank in range(size)]
    trace = Trace(f"{size} trainers", losses=parts[0]["losses"].tolist())
    trace.dense = [{"dense weights": step.tobytes()} for step in parts[0]["dense"].reshape(-1, 16)]
    for rank, part in enumerate(parts[1:], start=1):
        if part["losses"].tobytes() != parts[0]["losses"].tobytes() or (part["dense"] != parts[0]["dense"]).any():
            raise RuntimeError(f"rank {rank} has other losses or dense weights than rank 0: this is a bug in skirl")
    owner = [Placement.even(size).site_of(of) for of in keys]
    for name in ("before", "after"):
        ends = [np.concatenate([[0], np.cumsum([(o == rank).sum() for o in owner])]) for rank in range(size)]
        for step, of in enumerate(owner):
            whole = np.empty(len(of), np.uint64)
            for rank, part in enumerate(parts):
                whole[of == rank] = part[name][ends[rank][step] : ends[rank][step + 1]]
            getattr(trace, name).append(whole)
    order = np.argsort(every := np.concatenate([part["keys"] for part in parts]), kind="stable")
    trace.keys, trace.rows = every[order], np.concatenate([part["rows"] for part in parts])[order]
    return trace, sum(int(part["moved"][0]) for part in parts)


def _leave_out(ours: Trace, reference: Trace, looks: int) -> None:
    """Make the fingerprints of steps that were not looked at equal. The next look compares their rows."""
    for step in range(len(ours.after)):
        if step % looks:
            ours.before[step] = reference.before[step]
        if (step + 1) % looks:
            ours.after[step] = reference.after[step]


def _run(size: int, folder: Path) -> None:
    """Start the trainers and wait for all of them. Raise the error of the first one that failed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "MASTER_ADDR": "127.0.0.1"}
    team = [
        subprocess.Popen(
            [sys.executable, "-m", "skirl.train.verify_trainer", str(folder)],
            env=common | {"MASTER_PORT": str(port), "WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank),
                          "LOCAL_WORLD_SIZE": str(size)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=PATIENCE)[1] for process in team]
    finally:
        for process in team:
            process.kill()
            process.wait()
    for rank, (process, text) in enumerate(zip(team, said, strict=True)):
        if process.returncode == REFUSED:
            raise ValueError(f"trainer {rank} of {size}: {text.strip().splitlines()[-1]}")
    for rank, (process, text) in enumerate(zip(team, said, strict=True)):
        if process.returncode:
            raise RuntimeError(f"trainer {rank} of {size} ended with {process.returncode}:\n{text[-4000:]}")
