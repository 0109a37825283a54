"""Train all variants of a recipe on one stream, race them, and write down the results."""

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from math import nan
from types import TracebackType
from typing import Any

from skirl.core.batch import Batch
from skirl.pipeline.lookahead import Lookahead, lookahead
from skirl.sweep.checkpoint import SweepSaving, forget, read_header
from skirl.sweep.contender import Contender
from skirl.sweep.entrant import Entrant, evaluate, facts, loss_of
from skirl.sweep.flags import RaceFlags, points
from skirl.sweep.folder import SweepFolder
from skirl.sweep.keeping import KeepFlags, Told, plain
from skirl.sweep.race import Race
from skirl.sweep.report import report
from skirl.sweep.resumed import check_variants
from skirl.sweep.shown import Shown
from skirl.sweep.study import Search
from skirl.sweep.sweep import Diverged, Sweep
from skirl.sweep.variants import Variant, Varied, hyperparameters, seeds_of_one
from skirl.tools.machine import machine, peak_bytes
from skirl.tools.os_errors import NotWritten
from skirl.tools.progress import Progress
from skirl.train.flags import LogFlags, ShowFlags
from skirl.train.recipe import Recipe
from skirl.train.verify import touched_rows

log = logging.getLogger("skirl")


def sweep_of(recipe: Recipe, variants: Sequence[Varied], *, form: str = "auto", resume: bool = False) -> Sweep:
    """Return the sweep of a recipe's variants. No memory is allocated for rows before its first batch.

    **Arguments**

    - `recipe`: what the variants have in common.
    - `variants`: the variants of the sweep.
    - `form`: how they train together, as for `Sweep`.
    - `resume`: whether the sweep resumes from a checkpoint.
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
    logged: LogFlags,
    show: ShowFlags,
    flags: dict[str, Any],
    drawn: Search | None = None,
) -> dict[str, Any]:
    """Train the variants, showing progress, and return the result.

    **Arguments**

    - `recipe`: what the variants have in common.
    - `variants`: the variants of the sweep.
    - `race_flags`: when they leave.
    - `keeping`: where they are saved, and when.
    - `logged`: what is written down.
    - `show`: what is shown.
    - `flags`: all flags of the command, to write down.
    - `drawn`: the trials of the variants, if they were drawn.
    """
    going = _Going(recipe, variants, race_flags, keeping, logged, flags, drawn)
    to = sys.stderr if show.json else sys.stdout
    progress = Progress("sweep", steps=going.stream.steps, to=to, quiet=show.quiet, below=going.shown.table)
    cache = recipe.cache
    plan: dict[str, Any] = {"depth": cache.depth, "prefetch": recipe.movement.prefetch, "policy": cache.policy}
    with (
        going,
        going.sweep,
        lookahead(going.stream, going.sweep, **plan, trace=logged.trace) as batches,
        Told(keeping.save is not None) as told,
        progress,
        ExitStack() as runs,
    ):
        going.begin(batches, runs)
        for batch in batches:
            if not going.step(batches, batch):
                break
            progress(batches.step, going.shown.facts)
            if going.keep(batches, told):
                break
        result = going.end(batches, told)
    if told.by == "Ctrl-C":
        log.warning("step %s is saved in %s: --resume goes on from there", f"{result['steps']:,}", keeping.save)
        raise KeyboardInterrupt
    return result


class _Going:
    """A sweep in progress: starts or resumes, steps, saves and ends. A failure before the first batch leaves no checkpoint.

    **Arguments**

    - `recipe`, `variants`, `race_flags`, `keeping`, `logged`, `flags`, `drawn`: as for `run`.
    """

    def __init__(
        self,
        recipe: Recipe,
        variants: Sequence[Varied],
        race_flags: RaceFlags,
        keeping: KeepFlags,
        logged: LogFlags,
        flags: dict[str, Any],
        drawn: Search | None,
    ) -> None:
        self.recipe, self.variants, self.keeping, self.flags = recipe, variants, keeping, flags
        self.drawn = drawn
        self.saved: dict[str, Any] | None = None
        """Facts of the checkpoint that the sweep resumes from; None if it starts afresh."""
        if keeping.goes_on:
            assert keeping.save is not None
            saved = self.saved = read_header(keeping.save, [variant.name for variant in variants])["also"]
            check_variants(saved, variants)
        resume = self.saved is not None
        self.stream = recipe.stream()
        steps = self.stream.steps or recipe.data.steps  # files are not counted beforehand: take the number asked for
        self.every = points(steps) if flags["log_every"] is None else flags["log_every"]
        """Steps between two lines of metrics."""
        self.race = Race([variant.name for variant in variants], seeds_of_one(variants), race_flags.rules(steps))
        where = self.saved["run"] if self.saved is not None and logged.folder() == "auto" else logged.folder()
        self.folder = SweepFolder(where or "none", f"sweep-{recipe.data.kind}", resume=keeping.resume)
        self.sweep = sweep_of(recipe, variants, resume=resume)
        table = hyperparameters(variants)
        try:
            self.entrants = {
                variant.name: Entrant(
                    variant, contender, variant.recipe.rates_of(contender.embeddings, contender.dense),  # type: ignore[arg-type]
                    lists=self.stream.lists, folder=self.folder.of(variant.name), every=self.every, resume=keeping.resume,
                    table=table,
                )
                for variant, contender in zip(variants, self.sweep.variants, strict=True)
            }  # fmt: skip
        except BaseException:
            self.sweep.close()  # so that a second try finds its stores free
            raise
        self.shown = Shown(self.race, self.entrants)
        self.results: dict[str, dict[str, Any]] = {}
        self.spent = 0
        """Steps taken so far, summed over variants."""
        self._came = False
        """True once there was a batch."""
        self.failed: str | None = None
        self.not_saved: str | None = None
        """Why the newest checkpoint could not be written, if so."""
        self._saving: SweepSaving | None = None
        self._began = time.monotonic()

    def __enter__(self) -> "_Going":
        self.folder.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.folder.__exit__(kind, error, trace)
        came_to_nothing = isinstance(error, Exception) and not self._came and self.saved is None
        if came_to_nothing and self.keeping.save is not None:
            forget(self.keeping.save)

    def begin(self, batches: Lookahead, runs: ExitStack) -> None:
        """Resume from the checkpoint, or write a first one and wait for it, so that the sweep can be resumed from now on.

        runs: closes the run folder of each variant.
        """
        if self.saved is not None and self.keeping.save is not None:
            self.sweep.load(self.keeping.save, parts=self._parts)
            self.race.load_state_dict(self.saved["race"])
            self.spent, self.results = self.saved["spent"], self.saved["results"]
            for name, result in self.results.items():
                self.entrants[name].end(result["auc"])
        self.folder.begin(self.flags, self.variants, self.race, batches.step)
        for name in self.race.racing:
            runs.enter_context(self.entrants[name].run.begin(batches, self.entrants[name].meter))
        if self.saved is None and self.keeping.save is not None:
            self._save(batches)
            self._settle()

    def step(self, batches: Lookahead, batch: Batch) -> bool:
        """Train all that race on a batch and drop those that are behind. Return False if none is left.

        batch: the batch in the loop.
        """
        racing, race, entrants = self.race.racing, self.race, self.entrants
        self._came = True
        try:
            self.sweep.step(batch)
        except Diverged as error:
            self.failed = str(error)
        self.spent += len(racing)
        losses = {name: entrants[name].step(batch) for name in racing}
        if self.failed is not None:
            self.results |= {
                name: entrants[name].finish(batches, f"diverged at step {batches.step:,}") for name in racing
            }
            return False
        for left in race.see([losses.get(name, nan) for name in race.names]):
            if left.kind != "diverged":
                self.sweep.drop(left.variant, left.why)
            self.results[left.variant] = entrants[left.variant].finish(batches, left.why)
            self.folder.left(left)
        last = batches.step == self.stream.steps
        if last and self.stream.held_out:
            held_out = self.stream.held_out_at(batches.state_dict()["loader"])
            evaluate([entrants[name] for name in race.racing], batches.step, held_out or ())
        for name in race.racing:
            entrants[name].after_step(batches)
        if batches.step % self.every == 0 or last:
            seconds = time.monotonic() - self._began
            self.folder.standing(batches.step, seconds, race.standing(), lambda: self.shown.aucs(now=True))
        self.shown.rate()
        return True

    def keep(self, batches: Lookahead, told: Told) -> bool:
        """Save if a checkpoint is due. Return True if the sweep was told to stop."""
        stop = told.by is not None
        if self.keeping.save is not None:
            if self._saving is not None and self._saving.done:
                self._settle()
            if stop or batches.step == self.stream.steps or self.keeping.due(batches.step):
                self._save(batches)
            if stop:
                self._settle()
        return stop

    def end(self, batches: Lookahead, told: Told) -> dict[str, Any]:
        """Finish the remaining variants, write the result and return it."""
        race, results = self.race, self.results
        results |= {
            name: self.entrants[name].finish(batches, None) for name in race.racing if not self.entrants[name].done
        }
        self._settle()
        if self.drawn is not None and told.by is None:
            self.drawn.tell(race, failed=self.failed is not None)
        aucs, seconds = self.shown.aucs(now=True), time.monotonic() - self._began
        of_variants = [f"{name}: {text}" for name in race.names for text in results[name]["missing"]]
        result = {
            "command": "sweep",
            **self.flags,
            "winner": None if self.failed else race.winner(),
            "steps": batches.step,
            "variant_steps": self.spent,
            "cost": self.spent / max(1, batches.step * len(self.variants)),
            "seed_noise": race.seed_noise(),
            "seconds": seconds,
            "samples_per_second": self.shown.rate(),
            "standing": [asdict(place) | {"auc": aucs.get(place.variant)} for place in race.standing()],
            "by_variant": {name: facts(results[name]) for name in race.names},
            "plans": self.sweep.plans,
            "read_batches": self.sweep.read_batches,
            "peak_bytes": peak_bytes(),
            "machine": machine(),
            "run": self.folder.name,
            "stopped_by": told.by,
            "missing": self.folder.missing + of_variants,
            "failed": self.failed or self.not_saved,
        }
        page = self.folder.finish(result, lambda folder: report(folder, None)["page"])
        return result | {"page": page, "missing": self.folder.missing + of_variants}

    def _parts(self, contender: Contender) -> list[Any]:
        return self.entrants[contender.name].parts

    def _save(self, batches: Lookahead) -> None:
        """Wait for the checkpoint before, then begin a new one. If it cannot be written, the sweep goes on."""
        assert self.keeping.save is not None
        self._settle()
        also = {
            "race": self.race.state_dict(), "run": self.folder.name, "spent": self.spent, "results": self.results,
            "search": None if self.drawn is None else self.drawn.also, "flags": self.flags,
            "overrides": {variant.name: dict(variant.overrides) for variant in self.variants},
        }  # fmt: skip
        try:
            self._saving = self.sweep.save(self.keeping.save, parts=self._parts, also=plain(also), wait=False)
        except NotWritten as error:
            self._fail(batches.step, error)

    def _settle(self) -> None:
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.wait()
            self.not_saved = None
        except NotWritten as error:
            self._fail(saving.step, error)

    def _fail(self, step: int, error: NotWritten) -> None:
        self.not_saved = f"step {step:,} is not saved: {error}"
        log.warning("%s. Training goes on, and the next checkpoint is tried all the same", self.not_saved)
