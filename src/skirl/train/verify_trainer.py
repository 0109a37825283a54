"""One trainer of `skirl verify --trainers`: trains run after run and saves a trace of each for the comparison.

`verify_trainers` starts it as `python -m skirl.train.verify_trainer FOLDER`, in a process per trainer.
"""

import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from skirl.engine.access import peek
from skirl.engine.engine import Engine
from skirl.peers.job import fail
from skirl.train.fingerprints import digest, fingerprints, rows_of
from skirl.train.recipe import Recipe
from skirl.train.train import steps
from skirl.train.trainers import TrainerShare

JOB = "job.json"
REFUSED = 3
"""The exit code of a trainer whose last line of stderr is a message for the user."""


def main(folder: Path) -> None:
    """Do all runs of the job in a folder."""
    job = json.loads((folder / JOB).read_text())
    share = TrainerShare.of_job()
    for number, run in enumerate(job["runs"]):
        recipe = recipe_of(Recipe.of(**job["flags"]), run)
        recipe.use_threads()
        store: str = f"disk:{folder / str(number)}" if run["store"] == "disk" else run["store"]
        naps = random.Random(number * share.size + share.rank)
        found = trace(recipe, run["cache"], store, share, naps, looks_of(run))
        np.savez(folder / f"{number}-{share.rank}.npz", **found)


def recipe_of(recipe: Recipe, run: dict[str, Any]) -> Recipe:
    """Return the recipe of a run."""
    return replace(
        recipe,
        optimizer=replace(recipe.optimizer, optimizer=run["optimizer"]),
        cache=replace(recipe.cache, depth=run["depth"]),
    )


def looks_of(run: dict[str, Any]) -> int:
    """Return after how many steps of a run to look at a step's rows. Looking waits for all that is on its way to owners."""
    return 1 if run["depth"] == 1 else 3


def trace(
    recipe: Recipe, cache: int, store: str, share: TrainerShare, naps: random.Random, looks: int
) -> dict[str, Any]:
    """Train and return losses, dense weights, and this trainer's rows in each step and at the end.

    looks: the result of `looks_of`; in other steps, fingerprints are 0.
    """
    embeddings = recipe.embeddings(cache, store=store)
    model, dense = recipe.model_over(embeddings)
    rates, engine, shards = recipe.rates_of(embeddings, dense), embeddings.engine, recipe.step.shards
    losses: list[float] = []
    weights: list[bytes] = []
    before: list[np.ndarray] = []
    after: list[np.ndarray] = []
    whole = [_mine(engine, rows_of(batches, engine.schema)) for batches in recipe.in_steps()]

    def now(keys: np.ndarray, step: int) -> np.ndarray:
        if step % looks:
            return np.zeros(len(keys), np.uint64)
        engine.settle()
        batches.drain()
        return fingerprints(peek(engine, keys, 0)[0])

    with recipe.lookahead(model, share.of(recipe.stream(), shards)) as batches:
        batches.hook = lambda stage, step: time.sleep(naps.random() * 0.002)
        before.append(now(whole[0], 0))
        for step, done in enumerate(steps(model, dense, batches, rates, batches.micros)):
            losses.append(share.whole(done)[0].loss)
            weights.append(digest(b"".join(digest(w) for w in model.parameters() if w.numel())))
            after.append(now(whole[step], step + 1))
            if step + 1 < len(whole):
                before.append(now(whole[step + 1], step + 1))
    embeddings.flush()
    keys = np.sort(np.concatenate([np.empty(0, np.int64), *engine.store.keys()]))
    rows = np.empty((len(keys), engine.widths[0]), engine.dtype)
    engine.store.read(keys, rows)
    moved = engine.counters
    embeddings.close()
    return {
        "losses": np.array(losses),
        "dense": np.frombuffer(b"".join(weights), np.uint8),
        "before": np.concatenate(before),
        "after": np.concatenate(after),
        "keys": keys,
        "rows": rows,
        "moved": np.array([moved.fetched, moved.written, moved.new]),
    }


def _mine(engine: Engine, keys: np.ndarray) -> np.ndarray:
    """Return the keys whose rows this trainer owns."""
    return keys if engine.exchange is None else keys[engine.exchange.owns(keys)]


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except ValueError as error:
        fail(error)
        print(error, file=sys.stderr)
        sys.exit(REFUSED)
