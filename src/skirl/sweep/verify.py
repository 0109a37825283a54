"""Train the variants of a recipe together, alone and in plain Python, and compare every bit."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from skirl.core.reference import Reference
from skirl.core.tables import Schema
from skirl.engine.access import peek
from skirl.engine.capacity import CacheSize
from skirl.engine.engine import Engine
from skirl.pipeline.lookahead import lookahead
from skirl.sweep.contender import Contender
from skirl.sweep.crew import sweep_of
from skirl.sweep.dense import LANES, LOOP
from skirl.sweep.sweep import Sweep
from skirl.sweep.variants import Varied
from skirl.train.recipe import Recipe
from skirl.train.verify import PlainEmbeddings, Trace, compare, digest, fingerprints, rows_of, touched_rows

FORMS, DEPTHS, STORES = (LOOP, LANES), (1, "auto"), ("memory", "disk")
LATE = 0.002
"""Most seconds that a stage is delayed on purpose."""


def verify_variants(recipe: Recipe, variants: Sequence[Varied]) -> dict[str, Any]:
    """Train the variants in each form, with two caches, two depths, both stores and delayed stages. Return the differences.

    **Arguments**

    - `recipe`: what the variants have in common.
    - `variants`: the variants; each is also trained alone, and over the plain reference.
    """
    started, touched = time.monotonic(), touched_rows(recipe)
    least = recipe.cache_size(touched)
    if not isinstance(least, int):
        raise ValueError(f"cache is {least!r}: with vary, set it to rows or a share of the touched rows")
    batches = list(recipe.in_steps())
    schema = Schema.of(recipe.tables())
    differences: list[str] = []
    fetched = runs = 0
    threads = torch.get_num_threads()
    torch.set_num_threads(recipe.device.threads or 1)
    try:
        expected = {v.name: (_alone(recipe, v, least), _in_plain_python(recipe, v)) for v in variants}
        for form, rows, depth, store in product(FORMS, (least, 2 * least), DEPTHS, STORES):
            found, moved = _together(recipe, variants, form, rows, depth, store)
            fetched, runs = fetched + moved, runs + 1
            for variant in variants:
                for other in expected[variant.name]:
                    differs = compare(found[variant.name], other, schema, batches)
                    if differs is not None:
                        told = f"{form}, cache {rows}, depth {depth}, store {store}"
                        differences.append(f"variant {variant.name}, {told}: {differs}")
    finally:
        torch.set_num_threads(threads)
    return {
        "variants": [variant.name for variant in variants],
        "runs": runs,
        "differences": len(differences),
        "bits_equal": not differences,
        "first": differences[0] if differences else None,
        "fetched": fetched,
        "seconds": time.monotonic() - started,
    }


class _Watched:
    """One variant of a run, and the trace that it leaves."""

    def __init__(self, name: str, variant: Varied, contender: Contender) -> None:
        self.trace, self.contender = Trace(name), contender
        self.engine: Engine = contender.embeddings.engine
        self._rates = variant.recipe.rates_of(contender.embeddings, contender.dense)  # type: ignore[arg-type]

    def before(self, keys: np.ndarray) -> None:
        """Record the rows that the next batch uses."""
        self.trace.before.append(fingerprints(peek(self.engine, keys, 0)[0]))

    def after(self, keys: np.ndarray) -> None:
        """Record loss, weights and rows after training on the batch."""
        trace, contender = self.trace, self.contender
        self._rates.step()
        assert contender.loss is not None
        trace.losses.append(contender.loss)
        trace.dense.append({name: digest(w) for name, w in contender.model.named_parameters() if w.numel()})
        trace.after.append(fingerprints(peek(self.engine, keys, 0)[0]))

    def end(self) -> Trace:
        """Flush the rows to the store, record them all and return the trace."""
        trace, engine = self.trace, self.engine
        engine.flush()
        trace.keys = np.sort(np.concatenate([np.empty(0, np.int64), *engine.store.keys()]))
        trace.rows = np.empty((len(trace.keys), engine.widths[0]), engine.dtype)
        engine.store.read(trace.keys, trace.rows)
        return trace


def _together(
    recipe: Recipe, variants: Sequence[Varied], form: str, cache: CacheSize, depth: Any, store: str
) -> tuple[dict[str, Trace], int]:
    """Train all variants in one sweep. Return the trace of each, and how many rows were fetched again."""
    with tempfile.TemporaryDirectory(prefix="skirl-verify-") as folder:
        spec = store if store == "memory" else f"disk:{folder}"
        own = replace(recipe, cache=replace(recipe.cache, store=spec, cache=str(cache), depth=depth))
        with sweep_of(own, variants, form=form) as sweep, _ahead(own, sweep) as ahead:
            watched = [
                _Watched("sweep", variant, contender)
                for variant, contender in zip(variants, sweep.variants, strict=True)
            ]
            for batch in ahead:
                keys = rows_of([batch], sweep.fleet.schema)
                for each in watched:
                    each.before(keys)
                sweep.step(batch)
                for each in watched:
                    each.after(keys)
            ahead.close()
            fetched = sum(each.engine.counters.fetched for each in watched)
            return {each.contender.name: each.end() for each in watched}, fetched


@contextmanager
def _ahead(recipe: Recipe, sweep: Sweep) -> Iterator[Any]:
    rng = np.random.default_rng(0)
    plan = {"depth": recipe.cache.depth, "prefetch": recipe.movement.prefetch, "policy": recipe.cache.policy}
    with lookahead(recipe.in_shards(), sweep, **plan) as ahead:
        ahead.hook = lambda stage, step: time.sleep(LATE * rng.random() if stage in ("fetch", "write") else 0)
        yield ahead


def _alone(recipe: Recipe, variant: Varied, cache: CacheSize) -> Trace:
    """Train one variant alone and return its trace."""
    embeddings = variant.recipe.embeddings(cache, store="memory")
    model, dense = variant.recipe.model_over(embeddings)
    rates, engine, trace = variant.recipe.rates_of(embeddings, dense), embeddings.engine, Trace("alone")
    with recipe.lookahead(model) as batches:
        for _ in trace.record(engine.schema, model, dense, rates, batches, lambda keys: peek(engine, keys, 0)[0]):
            pass
    embeddings.flush()
    trace.keys = np.sort(np.concatenate([np.empty(0, np.int64), *engine.store.keys()]))
    trace.rows = np.empty((len(trace.keys), engine.widths[0]), engine.dtype)
    engine.store.read(trace.keys, trace.rows)
    embeddings.close()
    return trace


def _in_plain_python(recipe: Recipe, variant: Varied) -> Trace:
    """Train one variant over the plain reference and return its trace."""
    own = variant.recipe
    reference = Reference(own.tables(), own.row_optimizer(), own.data.seed)
    embeddings = PlainEmbeddings(reference, own.pooled)
    model, dense = own.model_over(embeddings)
    rates, trace, schema = own.rates_of(embeddings, dense), Trace("reference"), Schema.of(reference.tables)
    for _ in trace.record(schema, model, dense, rates, recipe.in_shards(), reference.read):
        pass
    trace.keys = np.array(sorted(reference.rows), np.int64)
    trace.rows = reference.read(trace.keys)
    return trace
