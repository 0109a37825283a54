"""Train all variants of a recipe on one stream, race them, and write down the results."""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from math import isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from skirl.engine.capacity import DoesNotFit
from skirl.peers.base import Alone
from skirl.peers.job import trainers, using
from skirl.peers.processes import launched_here
from skirl.pipeline.lookahead import lookahead
from skirl.sweep.checkpoint import check_same, plain, read_header
from skirl.sweep.entrant import Entrant, evaluate, sweep_of
from skirl.sweep.memory.policy import Infeasible
from skirl.sweep.race import Race, VariantPlace, difference
from skirl.sweep.ranks import Ranks, check_alone, of_whole, share_of
from skirl.sweep.sweep import Diverged
from skirl.sweep.variants import KeepFlags, RaceFlags, Varied, seeds_of_one
from skirl.tools.interrupts import Signals
from skirl.tools.machine import machine, peak_bytes
from skirl.tools.os_errors import NotWritten
from skirl.tools.progress import Facts, Speed, progress_of
from skirl.tools.units import figure, parse_bytes, timeout_of
from skirl.train.flags import EvaluationFlags, LogFlags
from skirl.train.loop import count_steps
from skirl.train.recipe import Recipe
from skirl.train.run_folder import RESULT, STANDING, SWEEP, Missing, folder_of, put_json

log = logging.getLogger("skirl")


def run(recipe: Recipe, *args: Any) -> dict[str, Any]:
    """Train the variants of a `SweepRun` that this rank of the job has; all ranks return the result of the whole sweep."""
    ranks = Ranks(trainers(timeout=recipe.step.peer_timeout or timeout_of(os.environ, 24 * 3600.0)))
    with using(Alone()):  # a rank's engine shares no rows
        one = SweepRun(ranks, recipe, *args)
        with one.opened(), progress_of("sweep", one.stream.steps) as progress:
            while one.leg():
                progress(one.race.step, one.facts)
                if one.keep():
                    break
            return one.end()


KEPT = (
    "steps", "samples", "loss", "auc", "logloss", "ne", "test_auc", "test_logloss", "left", "run", "exact",
)  # fmt: skip
"""What the result of a sweep has of that of each variant."""
SECONDS = 2.0
"""Most that several ranks train until they meet: a signal ends all of them at the same step."""


class Told(NamedTuple):
    """What a rank tells of its steps since all met."""

    losses: dict[str, list[float]]
    """Of its variants that raced, by step; fewer steps than others have if all of them diverged."""
    samples: list[int]
    last: bool
    """Whether the stream ends with them, which only who reads the stream knows."""
    signal: str | None
    now: float


class SweepRun:
    """A sweep in progress, with those of its variants that this rank trains."""

    def __init__(
        self,
        ranks: Ranks,
        recipe: Recipe,
        variants: Sequence[Varied],
        race_flags: RaceFlags,
        keeping: KeepFlags,
        logged: LogFlags,
        flags: dict[str, Any],
        evaluation: EvaluationFlags,
    ) -> None:
        self.ranks, self.variants, self.keeping, self.flags = ranks, variants, keeping, flags
        self.header: dict[str, Any] | None = None
        """Of the checkpoint that the sweep resumes from."""
        saved: dict[str, Any] = {}
        if keeping.goes_on:
            assert keeping.save is not None
            self.header = read_header(keeping.save, [variant.name for variant in variants])
            saved = self.header["also"]
            check_same(saved, flags, variants)
        elif keeping.resume:
            log.warning("%s holds no checkpoint: the sweep begins, at step 0", keeping.save)
        pooled = {variant.recipe.pooled: variant.name for variant in variants}
        if len(pooled) > 1:
            raise ValueError(
                f"variant {pooled[True]} pools the ids of a feature and {pooled[False]} does not: run two sweeps"
            )
        self.stream = recipe.stream()
        steps = self.stream.steps or recipe.data.steps  # files are not counted beforehand: take the number asked for
        if steps is None and "%" in (race_flags.rungs or ""):
            steps = ranks.told(count_steps(recipe) if ranks.first else None, "its steps")[0]
        self.every, self.eval_every = logged.log_every, evaluation.eval_every
        epochs, names = recipe.data.epochs, [variant.name for variant in variants]
        rules = {"rungs": race_flags.at(steps, epochs, self.eval_every), "keep": race_flags.keep, "again": epochs > 1}
        self.race = Race(names, seeds_of_one(variants), **rules)
        if saved:
            self.race.load_state_dict(saved["race"])
        where = saved["run"] if saved and logged.folder() == "auto" else logged.folder()
        path = folder_of(
            (where or "none") if ranks.first else "none", f"sweep-{recipe.data.kind}", SWEEP, keeping.resume
        )
        self._path: str | None = ranks.told(path and str(path), "the folder")[0]
        """Folder of the sweep, which the first rank writes. The variants of all have folders there."""
        self._missing = Missing()
        self.results: dict[str, dict[str, Any]] = saved.get("results", {})
        self._racing = [variant for variant in variants if variant.name in self.race.racing]
        check_alone(ranks.size, recipe)
        self.recipe, own = share_of(recipe, self._racing, ranks.rank, ranks.size)
        memory = flags["memory"]
        if ranks.size > 1 and memory not in (None, "auto"):
            memory = f"{parse_bytes(memory) // ranks.size}B"
        self.sweep = sweep_of(self.recipe, own, resume=keeping.resume, inexact=flags["inexact"], memory=memory)
        self._own, self._evaluation = own, evaluation
        self.entrants: dict[str, Entrant] = {}
        self.speed = Speed()
        """Of the stream: each sample counts once, for all variants."""
        self.samples = 0
        self._last = False
        """Whether the stream ended when all met."""
        self._apart = 1
        """Most steps until all meet again."""
        self._began = self._now = self._saved_at = ranks.told(time.monotonic(), "the time")[0]
        """Of the first rank."""
        self._saved_step: int | None = None if self.header is None else self.header["step"]
        """Of the checkpoint that counts."""
        self._not_saved: str | None = None
        """Why the last one could not be written."""
        self._signals = Signals(keeping.save is not None, launched_here())
        self.stopped_by: str | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Train in this block."""
        cache = self.recipe.cache
        ahead = {"depth": cache.depth, "prefetch": self.recipe.movement.prefetch, "policy": cache.policy}
        with (
            self.sweep,
            lookahead(self.stream, self.sweep, **ahead) as self.batches,
            ExitStack() as runs,
            self._signals,
        ):
            try:
                self.begin()
                for entrant in self.entrants.values():
                    runs.enter_context(closing(entrant.run.begin(self.batches, entrant.meter)))
                yield
            except BaseException as error:
                self.ranks.peers.fail(error)  # before this rank writes its rows
                raise

    def begin(self) -> None:
        for variant, one in zip(self._own, self.sweep.variants, strict=True):
            alone = LogFlags(run=f"{self._path}/{variant.name}" if self._path else "none", log_every=self.every)
            self.entrants[variant.name] = Entrant(variant, one, self.keeping, self._evaluation, alone)
        if self.header is not None:
            assert self.keeping.save is not None
            self.sweep.load_from(self.keeping.save, self.header)
            for contender in self.sweep.racing:  # it may have had inexact steps before
                contender.exact = not self.flags["inexact"]
        self._begun_at = self.batches.step
        self._coming = iter(self.batches)

    @property
    def here(self) -> list[Entrant]:
        """The variants in the race that this rank trains."""
        return [self.entrants[name] for name in self.race.racing if name in self.entrants]

    @property
    def failed(self) -> str | None:
        """Why no variant is left; None while one races."""
        if self.race.racing:
            return None
        last = self.race.left[-1]
        return f"all variants have diverged, {last.variant} as the last one, which {last.state}"

    def leg(self) -> bool:
        """Train until all ranks meet, and drop those below a rung. Return False if no variant or no batch is left."""
        race, left = self.race, list[VariantPlace]()
        losses, samples = self._trained()
        if not samples:
            return False
        if race.step == self._begun_at:
            self._put(SWEEP, {
                "flags": self.flags, "variants": [{"name": v.name, "overrides": v.overrides} for v in self.variants],
                "started": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(),
            })  # fmt: skip
        for of_step, count in zip(losses, samples, strict=True):
            left += race.see(of_step)
            if not race.racing:
                break
            self.samples += count
        self._let_leave(left)
        step = race.step
        due = self._last or (self.eval_every is not None and step % self.eval_every == 0)
        if due and race.racing and self.stream.held_out:
            self._let_leave(self._judge())
        for entrant in self.here:
            entrant.after_step(self.batches, last=self._last)
        self.speed.reached(self.samples)
        if step % self.every == 0 or self._last or not race.racing:
            self._put(STANDING, {"step": race.step, "places": [asdict(place) for place in race.standing()]})
        return bool(race.racing)

    def _put(self, name: str, facts: dict[str, Any]) -> None:
        """Write a file of the folder. One that cannot be written is listed as missing, and does not end the sweep."""
        if self.ranks.first and self._path is not None:
            folder = Path(self._path)
            with self._missing.tried(name, folder):
                folder.mkdir(parents=True, exist_ok=True)
                put_json(folder / name, {"command": "sweep", **facts})

    def _meeting(self) -> int:
        step = self.race.step
        every = filter(None, (self.every, self.eval_every, self.keeping.save_every))
        coming = [rung for rung in self.race.rungs if rung > step]
        return min(step + self._apart, *coming[:1], *((step // each + 1) * each for each in every))

    def _trained(self) -> tuple[np.ndarray, list[int]]:
        """Train on all ranks until they meet. Return, by step, the losses of all variants and how many samples it had."""
        began = self._now
        try:
            own = self._train(self._meeting())
        except DoesNotFit as error:
            raise of_whole(error, self._racing, self.ranks.size) from error
        except Infeasible as error:
            raise Infeasible(error.least * self.ranks.size, error.limit * self.ranks.size) from error
        told = [Told(*one) for one in self.ranks.told(own, "losses")]
        self._now = told[0].now
        self.stopped_by = self.stopped_by or next(filter(None, (one.signal for one in told)), None)
        self._last = any(one.last for one in told)
        samples = max((one.samples for one in told), key=len)
        losses = np.full((len(samples), len(self.race.names)), nan)
        for one in told:
            for name, of in one.losses.items():
                losses[: len(of), self.race.names.index(name)] = of
                if len(of) < len(samples) and all(isfinite(each) for each in of):
                    raise RuntimeError(
                        "the data ended in one process of the sweep and not in another: did files change?"
                    )
        if self.ranks.size > 1 and samples:
            self._apart = max(1, int(SECONDS * len(samples) / max(1e-6, self._now - began)))
        return losses, samples

    def _train(self, end: int) -> Told:
        live, samples, last = self.here, list[int](), False
        losses = {entrant.name: list[float]() for entrant in live}
        while live and not last and self.race.step + len(samples) < end:
            if samples:  # the last step before all meet is written down then
                for entrant in live:
                    entrant.after_step(self.batches)
            self.ranks.peers.comes(self.race.step + len(samples) + 1)
            if (batch := next(self._coming, None)) is None:
                break
            with suppress(Diverged):  # if all of this rank did, others may go on
                self.sweep.step(batch)
            for entrant in live:
                entrant.step(batch)
                losses[entrant.name].append(entrant.loss)
                if entrant.contender.left is not None:
                    entrant.after_step(self.batches, last=True)
            samples.append(len(batch.labels))
            last = self.batches.step == self.stream.steps
            live = [one for one in live if isfinite(one.loss)]
        return Told(losses, samples, last, self._signals.came, time.monotonic())

    def facts(self) -> Facts:
        first, *others = self.race.standing()
        others = [one for one in others if one.state == "races" and one.difference]
        losses = {"held out": first.held_out, "loss": first.loss}
        return {
            "leader": first.variant,
            **{name: figure(value, 5) for name, value in losses.items() if value is not None},
            **({"next": f"{others[0].variant} {difference(others[0])}"} if others else {}),
            "racing": f"{len(self.race.racing)} of {len(self.variants)}",
            **({"samples/s of each": f"{rate:,.0f}"} if (rate := self.speed.rate(self.samples)) else {}),
        }

    def _judge(self) -> list[VariantPlace]:
        with self.speed.paused():
            own = {}
            if due := [entrant for entrant in self.here if entrant.judge.due(self.race.step, last=self._last)]:
                own = evaluate(due, self.race.step, self.stream.held_out_at(self.batches.state_dict()["loader"]) or ())
            found = self.ranks.joined(own, "evaluations")
        return self.race.judge(found, last=self._last)

    def _let_leave(self, left: Sequence[VariantPlace]) -> None:
        """Let variants leave that have left the race. A rank that has none left stops training, and frees what it holds."""
        if not left:
            return
        results, path = {}, self.keeping.save
        for one in left:
            if (entrant := self.entrants.get(one.variant)) is None:
                continue
            entrant.after_step(self.batches, last=True)
            if not one.diverged and path is not None:  # as a run is saved at its end
                with entrant.missing.tried("the last checkpoint", path / entrant.name, of=NotWritten):
                    self.sweep.saved(path, [entrant.contender])
            results[entrant.name] = entrant.finish(self.batches, one.state)
            if entrant.contender.left is None and len(self.sweep) > 1:
                self.sweep.drop(entrant.name, one.state)  # its memory is freed
        if results and not self.here:  # the others may go on for long
            self.batches.close()
            self.sweep.close()
            self.sweep.engine.release()
            self.sweep.forms.forget()
            for contender in self.sweep.racing:
                contender.leave("no variant is left", self.race.step)
        self.results |= self.ranks.joined(results, "who leaves")

    def keep(self) -> bool:
        """Save if it is time to. Return whether a signal ends the sweep."""
        stop, every, minutes = self.stopped_by is not None, self.keeping.save_every, self.keeping.save_minutes
        late = minutes is not None and self._now - self._saved_at >= 60 * minutes
        due = stop or self._last or late or (every is not None and self.race.step % every == 0)
        if due and self.keeping.save is not None:
            self._save()
        return stop

    def _save(self) -> None:
        """Save on all ranks. If a checkpoint cannot be written, the one before still counts."""
        assert self.keeping.save is not None
        self._saved_at, step = self._now, self.race.step
        also = {
            "race": self.race.state_dict(), "run": self._path, "results": self.results,
            "flags": self.flags, "recipes": {variant.name: variant.recipe.flat() for variant in self.variants},
        }  # fmt: skip
        left = {one.variant: (one.state, one.left or 0) for one in self.race.left}
        try:
            racing = [entrant.contender for entrant in self.here]
            header: dict[str, Any] = {"step": step, "left": left, "also": plain(also)}
            self.sweep.save_on(self.ranks, self.keeping.save, racing, **header)
        except NotWritten as error:
            self._not_saved = f"step {step:,} is not saved: {error}"
            log.warning("%s. Training goes on, and the next checkpoint is tried all the same", self._not_saved)
        else:
            self._saved_step, self._not_saved = step, None

    def end(self) -> dict[str, Any]:
        race, results = self.race, self.results
        if self.failed is None:
            own = {one.name: one.finish(self.batches, None) for one in self.here}
            results |= self.ranks.joined(own, "results")
        peaks, forms = zip(*self.ranks.told([peak_bytes(), self.sweep.forms.steps], "facts"), strict=True)
        steps = sum(map(Counter, forms), Counter[str]())
        spent = sum(race.step if one.left is None else one.left for one in race.standing())
        winner = None if self.failed or self.stopped_by else race.standing()[0].variant
        of_variants = [f"{name}: {text}" for name in race.names for text in results[name]["missing"]]
        result = {
            "command": "sweep",
            **self.flags,
            "winner": winner,
            "steps": race.step,
            "saved_step": self._saved_step,
            "variant_steps": spent,
            "cost": spent / max(1, (self.stream.steps or race.step) * len(race.names)),
            "seed_noise": race.seed_noise(),
            "seconds": time.monotonic() - self._began,
            "samples_per_second": self.speed.rate(self.samples),
            "standing": [asdict(place) for place in race.standing()],
            "by_variant": {
                name: {key: results[name][key] for key in KEPT if key in results[name]} for name in race.names
            },
            "processes_used": self.ranks.size,
            "peak_bytes": sum(peaks),
            "form": max(steps, key=steps.__getitem__, default=None),
            "exact": all(results[name]["exact"] for name in race.names),
            "machine": machine() | {"threads": self.recipe.device.threads},
            "run": self._path,
            "stopped_by": self.stopped_by,
            "missing": self._missing.told() + of_variants,
            "failed": self.failed or self._not_saved,
        }
        if self._path and (race.step > self._begun_at or not (Path(self._path) / RESULT).is_file()):
            self._put(RESULT, result)  # else a resume found nothing left to train
        return result | {"missing": self._missing.told() + of_variants}
