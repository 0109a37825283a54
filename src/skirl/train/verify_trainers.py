"""Compares the same run by several trainers, with any number, cache, depth, store and timing, with the plain reference. Each
is a process that does all runs with this number."""

import os
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import ceil
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from torch.multiprocessing import ProcessRaisedException, start_processes

from skirl.core.keys import table_of
from skirl.core.tables import Schema
from skirl.peers.job import leave, trainers
from skirl.tools.progress import progress_of
from skirl.train.loop import TrainerShare, keys_of, steps
from skirl.train.placed import placement_of
from skirl.train.recipe import Recipe
from skirl.train.verify import Delays, Trace, compare, in_plain_python, stored

DENSE = "dense weights"
DEPTHS = (1, 20, "auto")
STORES = ("memory", "disk")


def verify_trainers(
    recipe: Recipe,
    sizes: Sequence[int],
    caches: Sequence[int],
    stores: Sequence[str] = STORES,
) -> dict[str, Any]:
    """Train with each number of trainers and each cache, depth and store. Return the number of runs, and what differs."""
    started = time.monotonic()
    expected = in_plain_python(replace(recipe, cache=replace(recipe.cache, depth=1, store="memory")))
    expected.dense = {DENSE: np.concatenate([weights.reshape(-1) for weights in expected.dense.values()])}
    schema = Schema.of(recipe.tables())
    differences: list[str] = []
    fetched = done = 0
    cases = [
        {"cache": cache, "depth": depth, "store": store} for cache, depth, store in product(caches, DEPTHS, stores)
    ]
    with progress_of("verify", len(sizes) * len(cases)) as progress:
        for size in sizes:
            share = share_of(recipe, size)
            runs = [case | {"cache": ceil(int(case["cache"]) * share)} for case in cases]
            with tempfile.TemporaryDirectory(prefix="skirl-verify-") as folder:
                _run(size, recipe, runs, Path(folder))
                for number, case in enumerate(cases):
                    trace, moved = _joined(Path(folder), number, size)
                    fetched += moved
                    found = compare(trace, expected, schema)
                    if found is not None:
                        named = ", ".join(f"{name} {value}" for name, value in case.items())
                        differences.append(f"{size} trainers, {named}: {found}")
            done += len(cases)
            progress(done, lambda: {"differences": f"{len(differences):,}"})
    return {
        "trainers": list(sizes), "runs": done, "differences": len(differences),
        "first": differences[0] if differences else None, "fetched": fetched, "steps": len(expected.losses),
        "seconds": time.monotonic() - started,
    }  # fmt: skip


def share_of(recipe: Recipe, size: int) -> float:
    """Return the part of a lone trainer's cache that each of several needs, as tables are placed, and a tenth more."""
    placed, schema = placement_of(recipe, size), Schema.of(recipe.tables())
    counts = np.zeros(len(schema.tables))
    for batch in recipe.stream():
        counts += np.bincount(table_of(np.unique(keys_of(batch.sparse, schema))), minlength=len(counts))
    loads = np.full(size, sum(n for n, t in zip(counts, schema.tables) if t.name not in placed) / size)
    for n, table in zip(counts, schema.tables):
        if (place := placed.get(table.name)) is not None:
            loads[[place] if isinstance(place, int) else [*place]] += n
    return 1.1 * loads.max() / max(1, counts.sum())


def _joined(folder: Path, number: int, size: int) -> tuple[Trace, int]:
    """The trace of a run of all trainers, and how many rows they fetched."""
    parts = [np.load(folder / f"{number}-{rank}.npz") for rank in range(size)]
    trace = Trace(f"{size} trainers", parts[0]["losses"].tolist(), {DENSE: parts[0]["dense"]})
    for rank, part in enumerate(parts[1:], start=1):
        if any(part[name].tobytes() != parts[0][name].tobytes() for name in ("losses", "dense")):
            raise RuntimeError(f"rank {rank} has other losses or dense weights than rank 0: this is a bug in skirl")
    order = np.argsort(every := np.concatenate([part["keys"] for part in parts]), kind="stable")
    trace.keys, first = np.unique(every[order], return_index=True)
    bits = np.concatenate([part["rows"] for part in parts])[order].view(np.uint32)
    if len(first) and np.add.reduceat(bits != 0, first, dtype=np.int64).max() > 1:
        raise RuntimeError("two trainers have one number of a row: this is a bug in skirl")
    trace.rows = np.bitwise_or.reduceat(bits, first).view(np.float32) if len(first) else bits.view(np.float32)
    return trace, sum(int(part["fetched"]) for part in parts)


def _run(size: int, recipe: Recipe, runs: Sequence[dict[str, Any]], folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    get_context("forkserver").set_forkserver_preload([__name__])
    try:
        start_processes(_train_all, (size, port, recipe, runs, folder), size, start_method="forkserver")
    except ProcessRaisedException as error:
        kind, _, why = str(error).splitlines()[-1].partition(": ")
        if not kind.startswith(("skirl.", "ValueError", "OSError")):  # no sentence for users
            raise
        raise ValueError(f"one of {size} trainers failed: {why}") from None


def _train_all(rank: int, size: int, port: int, recipe: Recipe, runs: Sequence[dict[str, Any]], folder: Path) -> None:
    ranks = {"WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in ranks.items()}
    share = TrainerShare(trainers())
    for number, run in enumerate(runs):
        case = replace(recipe, cache=replace(recipe.cache, depth=run["depth"]))
        case.use_threads()
        store: str = f"disk:{folder / str(number)}" if run["store"] == "disk" else run["store"]
        np.savez(folder / f"{number}-{rank}.npz", **_trained(case, run["cache"], store, share, number))
    leave()


SECONDS = 0.02
"""How long a stage may be slow: others of this trainer may wait for a trainer whose own stage is slow."""


def _trained(recipe: Recipe, cache: int, store: str, share: TrainerShare, seed: int) -> dict[str, Any]:
    """Train, with slow stages. Return losses, and dense weights and this trainer's rows at the end."""
    embeddings = recipe.embeddings(cache, store=store)
    model, dense = recipe.model_over(embeddings)
    rates = recipe.rates_of(embeddings, dense)
    losses: list[float] = []
    with recipe.lookahead(model, share.of(recipe.stream(), recipe.step.shards)) as batches:
        batches.hook = Delays(batches, seed * share.size + share.rank, SECONDS)
        for done in steps(model, dense, batches, rates, batches.micros):
            losses.append(share.whole(done)[0].loss)
    keys, rows = stored(embeddings)
    embeddings.close()
    return {
        "losses": np.array(losses), "keys": keys, "rows": rows,
        "dense": np.concatenate([w.detach().cpu().numpy().reshape(-1) for w in model.parameters() if w.numel()]),
        "fetched": embeddings.engine.counters.fetched,
    }  # fmt: skip
