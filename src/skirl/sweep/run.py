"""Train all variants of a recipe on one stream, race them, and write down the results."""

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import isfinite, nan
from pathlib import Path
from types import TracebackType
from typing import Any

from skirl.sweep.checkpoint import Bests, begun, check_variants, forget, header_of, plain, read_header, write_header
from skirl.sweep.crew import Crew, Duty, check_pooled, facts
from skirl.sweep.crews import Crews, duties, how_many
from skirl.sweep.flags import KeepFlags, RaceFlags, points
from skirl.sweep.folder import SweepFolder
from skirl.sweep.race import BROKEN, Judged, Left, Race, best_of, difference
from skirl.sweep.sweep import Diverged
from skirl.sweep.variants import Varied, seeds_of_one
from skirl.tools.interrupts import Signals
from skirl.tools.machine import machine
from skirl.tools.os_errors import NotWritten
from skirl.tools.progress import Facts, Speed, progress_of
from skirl.tools.units import figure
from skirl.train.flags import EvaluationFlags, LogFlags
from skirl.train.recipe import Recipe

log = logging.getLogger("skirl")


def run(sweep_run: "SweepRun") -> dict[str, Any]:
    keeping = sweep_run.keeping
    reporting = progress_of("sweep", sweep_run.stream.steps)
    with sweep_run, sweep_run.crew, Signals(keeping.save is not None) as signals, reporting as progress:
        sweep_run.begin()
        while sweep_run.step():
            progress(sweep_run.steps, sweep_run.facts)
            if sweep_run.keep(signals):
                break
        return sweep_run.end(signals)


class SweepRun:
    """A sweep in progress. If it fails before its first batch, it leaves no checkpoint."""

    def __init__(
        self,
        recipe: Recipe,
        variants: Sequence[Varied],
        race_flags: RaceFlags,
        keeping: KeepFlags,
        logged: LogFlags,
        flags: dict[str, Any],
        evaluation: EvaluationFlags,
        processes: int | str,
    ) -> None:
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
        self.bests = Bests(
            keeping.save if keeping.keep_best else None, [v.name for v in variants], resume=keeping.resume
        )
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
        self.folder = SweepFolder(where or "none", f"sweep-{recipe.data.kind}", resume=keeping.resume)
        self.spent: int = saved.get("spent", 0)
        """Steps summed over variants."""
        self.results: dict[str, dict[str, Any]] = saved.get("results", {})
        racing = [variant for variant in variants if variant.name in self.race.racing]
        duty = Duty(
            recipe, racing, self.every, self.folder.of, resume=keeping.resume,
            goes_on=self.header is not None, trace=logged.trace, evaluation=evaluation, save=keeping.save,
            from_=keeping.from_, origin=origin,
        )  # fmt: skip
        self.processes = how_many(processes, recipe, len(racing), trace=logged.trace is not None)
        self.crew = Crew(duty) if self.processes == 1 else Crews(duties(duty, self.processes))
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
        self._began = self._saved_at = time.monotonic()

    def __enter__(self) -> "SweepRun":
        self.folder.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.folder.__exit__(kind, error, trace)
        came_to_nothing = isinstance(error, Exception) and not self._came and self.header is None
        if came_to_nothing and self.keeping.save is not None:
            forget(self.keeping.save)

    def begin(self) -> None:
        """Resume from the checkpoint, or write a first one and wait for it, so that the sweep can be resumed from now on."""
        step = self.crew.begin(self.keeping.save, self.header)
        self.folder.begin(self.flags, self.variants, self.race, step)
        if self.header is not None and self.bests.on:
            self.bests.go_on(self.header, self.judged)
        if self.header is None and self.keeping.save is not None:
            self._save()
            self._settle()

    def step(self) -> bool:
        """Train all that race on a batch, and drop those below a rung. Return False if none or no batch is left."""
        race, racing = self.race, self.race.racing
        done = self.crew.step()
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

    def _stand(self, step: int) -> None:
        seconds = time.monotonic() - self._began
        self.folder.standing(step, seconds, self.race, self._aucs)

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
            found = self.crew.evaluate(last=last)
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

    def keep(self, signals: Signals) -> bool:
        """Save if it is time to. Return whether a signal ends the sweep."""
        stop, step = signals.came is not None, self.race.step
        if self.keeping.save is not None:
            written = self._saving is not None and not self._still_saving
            best = self.bests.on and bool(self._best)
            due = stop or self._last or best or self.keeping.due(step, time.monotonic() - self._saved_at)
            if written:
                self._settle()
            if due:
                self._save()
            if stop:
                self._settle()
        return stop

    def end(self, signals: Signals) -> dict[str, Any]:
        race, results = self.race, self.results
        if self.failed is None:
            self._settle()
            results |= self.crew.finish(self._more(race.racing))
        self._settle()
        aucs, seconds = self._aucs(), time.monotonic() - self._began
        winner = None if self.failed else race.winner()
        of_variants = [f"{name}: {text}" for name in race.names for text in results[name]["missing"]]
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
            "processes_used": self.processes,
            **self.crew.facts(),
            "machine": machine() | {"threads": self.recipe.device.threads},
            "run": self.folder.name,
            "stopped_by": signals.came,
            "missing": self.folder.missing + of_variants,
            "failed": self.failed or self.not_saved or self.bests.missed,
        }
        self.folder.finish(result)
        return result | {"missing": self.folder.missing + of_variants}

    def _leave(self, why: dict[str, str], save: Path | None) -> None:
        if self.bests.on or save is not None:  # results name the best; what counts later would remove the last
            self._settle()
        self.results |= self.crew.leave(why, self._more(why), save=save)

    def _more(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return what the results of variants have that only the whole sweep knows."""
        return {name: {"best": self.bests.of(name, self.judged.get(name))} for name in names}

    def _aucs(self) -> dict[str, float | None]:
        """Return the AUC of every variant, also of those that no longer train; none if it counts samples of many epochs."""
        if self.recipe.data.epochs > 1:
            return {}
        done = {name: result["auc"] for name, result in self.results.items()}
        return {**(self.crew.aucs() if len(done) < len(self.variants) else {}), **done}

    def _save(self) -> None:
        assert self.keeping.save is not None
        self._settle()
        self._saved_at = time.monotonic()
        also = {
            "race": self.race.state_dict(), "run": self.folder.name, "spent": self.spent, "results": self.results,
            "flags": self.flags,
            "judged": {name: asdict(one) for name, one in self.judged.items()},
            "overrides": {variant.name: dict(variant.overrides) for variant in self.variants},
        }  # fmt: skip
        left = {one.variant: (one.why, one.step) for one in self.race.left}
        body = header_of(self.race.step, left, plain(also))
        try:
            self._saving = body, self.crew.save(self.keeping.save), self._best
        except NotWritten as error:
            with suppress(NotWritten):  # of other processes, lest they tell of it at the next one
                self.crew.wait_saved()
            self._fail(self.race.step, error, self._best)

    def _settle(self) -> None:
        """Return when the checkpoint that is being written is on disk: its header makes it count."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        assert self.keeping.save is not None
        body, names, best = saving
        try:
            self.crew.wait_saved()
            write_header(self.keeping.save, body, names)
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
