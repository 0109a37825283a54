"""Train all variants of a recipe on one stream, race them, and write down what comes of it."""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from math import nan
from typing import Any

from skirl.pipeline.lookahead import lookahead
from skirl.sweep.checkpoint import read_header
from skirl.sweep.contender import Contender
from skirl.sweep.entrant import Entrant, facts, loss_of
from skirl.sweep.flags import RaceFlags
from skirl.sweep.folder import SweepFolder
from skirl.sweep.keeping import KeepFlags, Told, plain
from skirl.sweep.race import Race
from skirl.sweep.sweep import Diverged, Sweep
from skirl.sweep.table import as_facts, drawn
from skirl.sweep.variants import Variant, Varied, seeds_of_one
from skirl.tools.machine import machine, peak_bytes
from skirl.tools.progress import Progress
from skirl.train.flags import LogFlags, ShowFlags
from skirl.train.recipe import Recipe
from skirl.train.verify import touched_rows

_AUCS_EVERY = 2.0
"""Seconds between two looks at the AUCs of all, which take a millisecond each."""


def sweep_of(recipe: Recipe, variants: Sequence[Varied], *, form: str = "auto", resume: bool = False) -> Sweep:
    """The sweep of a recipe's variants; nothing is allocated for rows before its first batch.

    **Arguments**

    - `recipe`: what they have in common.
    - `variants`: its variants.
    - `form`: how they are trained beside each other.
    - `resume`: whether it will go on from a checkpoint.
    """
    pooled = {variant.recipe.pooled: variant for variant in reversed(variants)}
    if len(pooled) > 1:
        raise ValueError(
            f"variant {pooled[True].name} pools the ids of a feature and {pooled[False].name} does not: run two sweeps"
        )
    recipes = {variant.name: variant.recipe for variant in variants}
    shared = [
        Variant(
            v.name,
            {"dim": v.recipe.model.row_dim, "optimizer": v.recipe.row_optimizer(), "seed": v.recipe.data.seed},
        )
        for v in variants
    ]
    import torch

    store, link = recipe.cache.store, recipe.movement.link
    return Sweep(
        lambda contender: recipes[contender.name].model_over(contender.embeddings),
        shared,
        recipe.tables(),
        cache=recipe.cache_size(touched_rows(recipe) if recipe.counts_first else 0),
        store=store if link is None else f"link:{link}:{store}",
        loss=loss_of,
        pooled=next(iter(pooled)),
        dtype=getattr(torch, recipe.device.dtype),
        device=recipe.device.device,
        threads=recipe.device.threads or 1,
        resume=resume,
        form=form,
    )


def run(
    recipe: Recipe,
    variants: Sequence[Varied],
    race_flags: RaceFlags,
    keeping: KeepFlags,
    log: LogFlags,
    show: ShowFlags,
    flags: dict[str, Any],
) -> dict[str, Any]:
    """Train the variants, showing progress; what came of it.

    **Arguments**

    - `recipe`: what they have in common.
    - `variants`: its variants.
    - `race_flags`: when they leave.
    - `keeping`: where they are saved.
    - `log`: what is written down.
    - `show`: what is shown.
    - `flags`: all of the command's, to write down.
    """
    saved: dict[str, Any] | None = None
    if keeping.goes_on:
        assert keeping.save is not None
        saved = read_header(keeping.save, [variant.name for variant in variants])["also"]
    stream = recipe.stream()
    race = Race([variant.name for variant in variants], seeds_of_one(variants), race_flags.rules(stream.steps))
    where = saved["run"] if saved is not None and log.folder() == "auto" else log.folder()
    folder = SweepFolder(where or "none", f"sweep-{recipe.data.kind}", resume=saved is not None)
    sweep = sweep_of(recipe, variants, resume=saved is not None)
    entrants = {
        variant.name: Entrant(
            variant, contender, variant.recipe.rates_of(contender.embeddings, contender.dense),  # type: ignore[arg-type]
            lists=stream.lists, folder=folder.of(variant.name), every=log.log_every, resume=saved is not None,
        )
        for variant, contender in zip(variants, sweep.variants, strict=True)
    }  # fmt: skip
    watch = _Watch(race, entrants)
    results: dict[str, dict[str, Any]] = {}
    spent, failed = 0, None
    to = sys.stderr if show.json else sys.stdout
    progress = Progress("sweep", steps=stream.steps, to=to, quiet=show.quiet, below=watch.table)
    cache, began = recipe.cache, time.monotonic()
    plan: dict[str, Any] = {"depth": cache.depth, "prefetch": recipe.movement.prefetch, "policy": cache.policy}

    def parts(contender: Contender) -> list[Any]:
        return entrants[contender.name].parts

    with (
        sweep,
        lookahead(stream, sweep, **plan, trace=log.trace) as batches,
        Told(keeping.save is not None) as told,
        progress,
        ExitStack() as runs,
    ):
        if saved is not None and keeping.save is not None:
            sweep.load(keeping.save, parts=parts)
            race.load_state_dict(saved["race"])
            spent, results = saved["spent"], saved["results"]
            for name, result in results.items():
                entrants[name].done, entrants[name].auc = True, result["auc"]
        folder.begin(flags, variants, race, batches.step)
        for name in race.racing:
            runs.enter_context(entrants[name].run.begin(batches, entrants[name].meter))
        for batch in batches:
            racing = race.racing
            try:
                sweep.step(batch)
            except Diverged as error:
                failed = str(error)
            spent += len(racing)
            losses = {name: entrants[name].step(batch) for name in racing}
            if failed is not None:
                results |= {
                    name: entrants[name].finish(batches, f"diverged at step {batches.step:,}") for name in racing
                }
                break
            for left in race.see([losses.get(name, nan) for name in race.names]):
                if left.kind != "diverged":
                    sweep.drop(left.variant, left.why)
                results[left.variant] = entrants[left.variant].finish(batches, left.why)
                folder.left(left)
            last = batches.step == stream.steps
            if last and stream.held_out:
                for name in race.racing:
                    entrants[name].evaluate(batches, stream.held_out_at(batches.state_dict()["loader"]))
            for name in race.racing:
                entrants[name].after_step(batches)
            if batches.step % log.log_every == 0 or last:
                folder.standing(batches.step, time.monotonic() - began, race.standing(), watch.aucs(now=True))
            watch.rate()
            progress(batches.step, watch.facts)
            if keeping.save is not None and (last or told.to_stop or keeping.due(batches.step)):
                also = {"race": race.state_dict(), "run": folder.name, "spent": spent, "results": results}
                sweep.save(keeping.save, parts=parts, also=plain(also))
            if told.to_stop:
                break
        results |= {name: entrants[name].finish(batches, None) for name in race.racing if not entrants[name].done}
        aucs = watch.aucs(now=True)
        result = {
            "command": "sweep",
            **flags,
            "winner": None if failed else race.winner(),
            "steps": batches.step,
            "variant_steps": spent,
            "cost": spent / max(1, batches.step * len(variants)),
            "seed_noise": race.seed_noise(),
            "seconds": time.monotonic() - began,
            "samples_per_second": watch.rate(),
            "standing": [asdict(place) | {"auc": aucs.get(place.variant)} for place in race.standing()],
            "by_variant": {name: facts(results[name]) for name in race.names},
            "plans": sweep.plans,
            "read_batches": sweep.read_batches,
            "peak_bytes": peak_bytes(),
            "machine": machine(),
            "run": folder.name,
            "stopped_by": "SIGTERM" if told.to_stop else None,
            "missing": [f"{name}: {text}" for name in race.names for text in results[name]["missing"]],
            "failed": failed,
        }
    folder.finish(result)
    return result


class _Watch:
    """What is shown while the race goes on."""

    def __init__(self, race: Race, entrants: dict[str, Entrant]) -> None:
        self._race, self._entrants = race, entrants
        self._aucs: dict[str, float | None] = {}
        self._due, self._began = 0.0, time.monotonic()
        self._before: int | None = None

    def aucs(self, *, now: bool = False) -> dict[str, float | None]:
        """Of all predictions of each variant so far."""
        if now or time.monotonic() >= self._due:
            for name, entrant in self._entrants.items():
                self._aucs[name] = entrant.auc if entrant.done else entrant.meter.metrics.scores().auc
            self._due = time.monotonic() + _AUCS_EVERY
        return self._aucs

    def rate(self) -> float:
        """Samples a second of the stream in this process: each counts once, however many variants are trained on it."""
        samples = max(entrant.meter.samples for entrant in self._entrants.values())
        if self._before is None:
            self._before = samples
            self._began = time.monotonic()
            return 0.0
        return (samples - self._before) / max(time.monotonic() - self._began, 1e-9)

    def table(self) -> Any:
        """On a terminal."""
        return drawn(self._race.standing(), self.aucs(), self.rate())

    def facts(self) -> Any:
        """Elsewhere."""
        return as_facts(self._race.standing(), self.aucs(), self.rate())
