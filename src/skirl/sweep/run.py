"""Train all variants of a recipe on one stream, race them, and write down the results."""

import logging
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import isfinite, nan
from pathlib import Path
from types import TracebackType
from typing import Any

from skirl.engine.capacity import DoesNotFit
from skirl.peers.base import Alone
from skirl.peers.job import trainers, using
from skirl.peers.processes import launched_here
from skirl.sweep.checkpoint import Bests, begun, check_variants, forget, header_of, plain, read_header, write_header
from skirl.sweep.crew import Crew, Duty, Stepped, check_pooled, facts
from skirl.sweep.flags import KeepFlags, RaceFlags, points
from skirl.sweep.folder import SweepFolder
from skirl.sweep.race import BROKEN, Judged, Left, Race, best_of, difference
from skirl.sweep.ranks import Ranks, of_whole, share_of
from skirl.sweep.sweep import FORMS, Diverged
from skirl.sweep.variants import Varied, seeds_of_one
from skirl.tools.interrupts import Signals
from skirl.tools.machine import machine
from skirl.tools.os_errors import NotWritten
from skirl.tools.progress import Facts, Speed, progress_of
from skirl.tools.units import figure, patience_of
from skirl.train.flags import EvaluationFlags, LogFlags
from skirl.train.recipe import Recipe

log = logging.getLogger("skirl")


def run(recipe: Recipe, *args: Any) -> dict[str, Any]:
    """Train the variants of a `SweepRun` that this rank of the job has; all ranks return the result of the whole sweep."""
    ranks = Ranks(trainers(patience=recipe.step.peer_patience or patience_of(os.environ, 24 * 3600.0)))
    with using(Alone()):  # a rank's engine shares no rows
        sweep_run = SweepRun(ranks, recipe, *args)
        reporting = progress_of("sweep", sweep_run.stream.steps)
        signals = Signals(sweep_run.keeping.save is not None, launched_here())
        with sweep_run, sweep_run.crew, signals, reporting as progress:
            try:
                sweep_run.begin()
                while sweep_run.step(signals):
                    progress(sweep_run.steps, sweep_run.facts)
                    if sweep_run.keep():
                        break
                return sweep_run.end()
            except BaseException as error:
                ranks.peers.fail(error)  # before this rank writes its rows
                raise


class SweepRun:
    """A sweep in progress. If it fails before its first batch, it leaves no checkpoint."""

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
        self.ranks = ranks
        self.recipe, self.variants, self.keeping, self.flags = recipe, variants, keeping, flags
        self.header: dict[str, Any] | None = None
        """Of the checkpoint that the sweep resumes from."""
        saved: dict[str, Any] = {}
        if keeping.goes_on:
            assert keeping.save is not None
            self.header = read_header(keeping.save, [variant.name for variant in variants])
            saved = self.header["also"]
            check_variants(saved, variants)
        check_pooled(variants)
        origin = begun(keeping, variants)
        self.evaluation = evaluation
        self.judged = {name: Judged(**one) for name, one in saved.get("judged", {}).items()}
        self._best: list[str] = []
        """The variants that were never better than after this step."""
        self.stream = recipe.stream()
        steps = self.stream.steps or recipe.data.steps  # files are not counted beforehand: take the number asked for
        self.every = points(steps) if flags["log_every"] is None else flags["log_every"]
        rules = race_flags.rules(steps, recipe.data.epochs, evaluation.eval_every)
        self.race = Race([variant.name for variant in variants], seeds_of_one(variants), rules)
        if saved:
            self.race.load_state_dict(saved["race"])
        where = saved["run"] if saved and logged.folder() == "auto" else logged.folder()
        name = f"sweep-{recipe.data.kind}"
        if ranks.first:
            self.folder = SweepFolder(where or "none", name, resume=keeping.resume)
        path = ranks.told(self.folder.name if ranks.first else None, "the folder")[0]
        if not ranks.first:  # its variants have folders there
            self.folder = SweepFolder(path or "none", name, resume=True)
        self.spent: int = saved.get("spent", 0)
        """Steps summed over variants."""
        self.results: dict[str, dict[str, Any]] = saved.get("results", {})
        racing = [variant for variant in variants if variant.name in self.race.racing]
        duty = Duty(
            recipe, racing, self.every, self.folder.of, resume=keeping.resume, goes_on=self.header is not None,
            trace=logged.trace, evaluation=evaluation, save=keeping.save, keep_best=keeping.keep_best,
            from_=keeping.from_, origin=origin, inexact=flags["inexact"], memory=flags["memory"],
        )  # fmt: skip
        own = share_of(duty, ranks.rank, ranks.size)
        self.bests = Bests(
            keeping.save if keeping.keep_best else None, [v.name for v in own.variants], resume=keeping.resume
        )
        self._duty = duty
        self.crew = Crew(own)
        self.speed = Speed()
        """Of the stream: each sample counts once, for all variants."""
        self.steps, self.samples = self.race.step, 0
        self._came = self._still_saving = self._last = False
        """Whether there was a batch; whether a checkpoint was still being written after the last step; whether the stream
        ended with that step."""
        self._saved_step = None if self.header is None else self.header["step"]
        self.failed: str | None = None
        self.not_saved: str | None = None
        self._saving: tuple[dict[str, Any], dict[str, str], list[str]] | None = None
        """The header of the checkpoint that is being written, and the names of its variants' checkpoints."""
        self._began = self._now = self._saved_at = ranks.told(time.monotonic(), "the time")[0]
        """Of the first rank."""
        self.stopped_by: str | None = None

    def __enter__(self) -> "SweepRun":
        self.folder.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.folder.__exit__(kind, error, trace)
        came_to_nothing = isinstance(error, Exception) and not self._came and self.header is None
        if came_to_nothing and self.ranks.first and self.keeping.save is not None:
            forget(self.keeping.save)

    def begin(self) -> None:
        """Resume from the checkpoint, or write a first one and wait for it, so that the sweep can be resumed from now on."""
        step = self.crew.begin(self.keeping.save, self.header)
        if self.ranks.first:
            self.folder.begin(self.flags, self.variants, self.race, step)
        if self.header is not None and self.bests.on:
            self.bests.go_on(self.header, self.judged)
        if self.header is None and self.keeping.save is not None:
            self._save()
            self._settle()

    def step(self, signals: Signals) -> bool:
        """Train all that race on a batch, and drop those below a rung. Return False if none or no batch is left."""
        race, racing = self.race, self.race.racing
        done = self._trained(signals)
        if done is None:
            return False
        self.steps, self._came, self._still_saving = done.step, True, done.saving
        self.spent += len(racing)
        if not any(map(isfinite, done.losses.values())):
            last = racing[-1]
            self.failed = str(Diverged.all_of(len(self.variants), last, done.step, done.losses[last]))
            with suppress(ValueError):  # that none is left
                race.see([nan] * len(race.names))
            self._let_leave(race.left[-len(racing) :])
            self._stand(done.step)
            return False
        self._let_leave(race.see([done.losses.get(name, nan) for name in race.names], unseen=done.unseen))
        self._last = last_step = done.last
        every, self._best = self.evaluation.eval_every, []
        if self.stream.held_out and (last_step or (every is not None and done.step % every == 0)):
            self._judge(done.step, last=last_step, unseen=done.unseen)
            if self.failed is not None:
                self._stand(done.step)
                return False
        self.crew.end_step(last=last_step)
        self.samples = done.samples
        self.speed.reached(done.samples)
        if done.step % self.every == 0 or last_step:
            self._stand(done.step)
        return True

    def _trained(self, signals: Signals) -> Stepped | None:
        """Train on a batch, on all ranks that have variants left. Return None if there is none."""
        self.ranks.peers.comes(self.race.step + 1)
        try:
            own, trains = (self.crew.step(), True) if self.crew.racing else (None, False)
        except DoesNotFit as error:
            raise of_whole(error, self._duty, self.ranks.size) from error
        told = self.ranks.told((own and asdict(own), trains, signals.came, time.monotonic()), "losses")
        self._now = told[0][3]
        self.stopped_by = self.stopped_by or next(filter(None, (came for *_, came, _ in told)), None)
        steps = [one for one, trains, *_ in told if trains]
        if None in steps:
            if any(steps):
                raise RuntimeError("the data ended in one process of the sweep and not in another: did files change?")
            return None
        losses = {name: loss for one in steps for name, loss in one["losses"].items()}
        return Stepped(**steps[0] | {"losses": losses, "saving": any(one["saving"] for one in steps)})

    def _stand(self, step: int) -> None:
        aucs = {} if self.folder.path is None else self._aucs()
        self.folder.standing(step, time.monotonic() - self._began, self.race, aucs)

    def facts(self) -> Facts:
        """Return the standing for one line."""
        first, *others = [one for one in self.race.standing() if one.rank == 1 or one.state in ("leads", "races")]
        losses = {"held out": first.held_out, "loss": first.loss}
        return {
            "leader": first.variant,
            **{name: figure(value, 5) for name, value in losses.items() if value is not None},
            **({"next": f"{others[0].variant} {difference(others[0])}"} if others else {}),
            "racing": f"{len(self.race.racing)} of {len(self.variants)}",
            "samples/s": f"{self.speed.rate(self.samples):,.0f}",
        }

    def _judge(self, step: int, *, last: bool, unseen: bool) -> None:
        with self.speed.paused():
            own = {name: one and asdict(one) for name, one in self.crew.evaluate(last=last).items()}
            told = self.ranks.joined(own, "evaluations")
        found = {name: one and Judged(**one) for name, one in told.items()}
        self.judged |= {name: one for name, one in found.items() if one is not None}
        if broken := [name for name, one in found.items() if one is None]:
            if len(broken) == len(self.race.racing):
                self.failed = (
                    f"all {len(self.variants)} variants have diverged, the last ones at step {step:,}, where {BROKEN}"
                )
            self._let_leave(self.race.diverged(broken, f"diverged at step {step:,}: {BROKEN}"))
            if self.failed is not None:
                return
        self._best = [name for name, one in found.items() if one is not None and one.is_best]
        if last or not unseen:
            self._let_leave(self.race.judge({name: one.best for name, one in self.judged.items()}, last=last))

    def _let_leave(self, left: Sequence[Left]) -> None:
        diverged = {one.variant: one.why for one in left if one.kind == "diverged"}
        others = {one.variant: one.why for one in left if one.kind != "diverged"}
        if diverged:
            self._leave(diverged, None)
        if others:
            self._leave(others, self.keeping.save)
        for one in left:
            self.folder.left(one)

    def keep(self) -> bool:
        """Save if it is time to. Return whether a signal ends the sweep."""
        stop, step = self.stopped_by is not None, self.race.step
        if self.keeping.save is not None:
            written = self._saving is not None and not self._still_saving
            best = self.bests.on and bool(self._best)
            due = stop or self._last or best or self.keeping.due(step, self._now - self._saved_at)
            if written:
                self._settle()
            if due:
                self._save()
            if stop:
                self._settle()
        return stop

    def end(self) -> dict[str, Any]:
        race, results = self.race, self.results
        if self.failed is None:
            self._settle()
            results |= self.ranks.joined(self.crew.finish(self._more(race.racing)), "results")
        self._settle()
        of_ranks = self.ranks.told(self.crew.facts(), "facts")
        missed = [one for one in self.ranks.told(self.bests.missed, "what is missing") if one]
        aucs, seconds = self._aucs(), time.monotonic() - self._began
        winner = None if self.failed else race.winner()
        of_variants = [f"{name}: {text}" for name in race.names for text in results[name]["missing"]]
        total = {name: sum(one[name] for one in of_ranks) for name in of_ranks[0]}
        result = {
            "command": "sweep",
            **self.flags,
            "winner": winner,
            "measure": race.measure,
            "steps": self.steps,
            "saved_step": self._saved_step,
            "variant_steps": self.spent,
            "cost": self.spent / max(1, (self.stream.steps or self.steps) * len(self.variants)),
            "seed_noise": race.seed_noise(),
            "seconds": seconds,
            "samples_per_second": self.speed.rate(self.samples),
            "standing": [asdict(place) | {"auc": aucs.get(place.variant)} for place in race.standing()],
            "by_variant": {name: facts(results[name]) for name in race.names},
            "rows": {} if self.failed else {name: results[name]["rows"] for name in race.racing},
            "best": best_of(winner, self.judged, {name: results[name].get("best") for name in race.names}),
            "from": next(filter(None, (results[name].get("from") for name in race.names)), None),
            "processes_used": self.ranks.size,
            **total,
            "form": max(FORMS, key=lambda form: total[f"{form}_steps"]),
            "exact": all(results[name]["exact"] for name in race.names),
            "machine": machine() | {"threads": self.recipe.device.threads},
            "run": self.folder.name,
            "stopped_by": self.stopped_by,
            "missing": self.folder.missing + of_variants,
            "failed": self.failed or self.not_saved or "\n".join(missed) or None,
        }
        if self.ranks.first:
            self.folder.finish(result)
        return result | {"missing": self.folder.missing + of_variants}

    def _leave(self, why: dict[str, str], save: Path | None) -> None:
        if self.bests.on or save is not None:  # results name the best; what counts later would remove the last
            self._settle()
        self.results |= self.ranks.joined(self.crew.leave(why, self._more(why), save=save), "who leaves")

    def _more(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return what the results of variants have that only the whole sweep knows."""
        return {name: {"best": self.bests.of(name, self.judged.get(name))} for name in names}

    def _aucs(self) -> dict[str, float | None]:
        """Return the AUC of every variant, also of those that no longer train; none if it counts samples of many epochs."""
        if self.recipe.data.epochs > 1:
            return {}
        done = {name: result["auc"] for name, result in self.results.items()}
        return {**(self.ranks.joined(self.crew.aucs(), "AUCs") if len(done) < len(self.variants) else {}), **done}

    def _save(self) -> None:
        assert self.keeping.save is not None
        self._settle()
        self._saved_at = self._now
        also = {
            "race": self.race.state_dict(), "run": self.folder.name, "spent": self.spent, "results": self.results,
            "flags": self.flags,
            "judged": {name: asdict(one) for name, one in self.judged.items()},
            "overrides": {variant.name: dict(variant.overrides) for variant in self.variants},
        }  # fmt: skip
        left = {one.variant: (one.why, one.step) for one in self.race.left}
        body = header_of(self.race.step, left, plain(also))
        try:
            path = self.keeping.save
            names = self.ranks.written(lambda: self.crew.save(path), "a checkpoint")
            self._saving = body, {name: of for one in names for name, of in one.items()}, self._best
        except NotWritten as error:
            with suppress(NotWritten):  # of other ranks, lest they tell of it at the next one
                self.crew.wait_saved()
            self._fail(self.race.step, error, self._best)

    def _settle(self) -> None:
        """Return when the checkpoint that is being written is on disk: its header makes it count."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        assert self.keeping.save is not None
        path, (body, names, best) = self.keeping.save, saving
        try:
            self.ranks.written(self.crew.wait_saved, "a checkpoint is on disk")
            self.ranks.written(lambda: write_header(path, body, names) if self.ranks.first else None, "its header")
            self._saved_step = body["step"]
            self.bests.keep(best, names, body["step"])
            self.crew.confirm()
            self.not_saved = None
        except NotWritten as error:
            self._fail(body["step"], error, best)

    def _fail(self, step: int, error: NotWritten, best: Sequence[str]) -> None:
        self.bests.miss(best, step, "it could not be saved")
        self.not_saved = f"step {step:,} is not saved: {error}"
        log.warning("%s. Training goes on, and the next checkpoint is tried all the same", self.not_saved)
