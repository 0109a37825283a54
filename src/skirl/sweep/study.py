"""Variants drawn by Optuna: its samplers and storage, with our race. A sweep asks for all its trials before it begins, and
reports their results when it is over.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any

from skirl.sweep.flags import MISSING, SearchFlags
from skirl.sweep.race import Race
from skirl.sweep.space import Space, spaces_of
from skirl.sweep.variants import Varied, checked_variants, text_of
from skirl.tools.flags import flags_of, read_as
from skirl.train.recipe import Recipe

NAME, OURS = "skirl", "skirl"
"""Name of the study, and of the attribute in which it keeps our facts."""
_ASKED = 100
"""Give up after drawing this many times the wanted number of trials: new ones are too rare."""
_FREE = ("cache", "movement", "peers", "device")
"""Parts of a recipe that do not change results."""


class Search:
    """The trials of one sweep.

    **Arguments**

    - `base`: what the variants have in common.
    - `flags`: what is drawn, how, and where it is kept.
    - `seeds`: each trial is trained with each of these seeds; if empty, with that of the recipe.
    - `saved`: the value of `also` in the checkpoint that the sweep resumes from; None if it starts afresh.
    - `keep`: whether to keep the trials in the study; if False, they are only drawn.
    """

    def __init__(
        self,
        base: Recipe,
        flags: SearchFlags,
        *,
        seeds: Sequence[int] = (),
        saved: Mapping[str, Any] | None = None,
        keep: bool = True,
    ) -> None:
        self._optuna = _optuna()
        self._flags, self._seeds, self._spaces = flags, seeds, spaces_of(flags.search)
        self._study: Any = None
        if saved is None:
            self._study = self._opened(base, flags.study if keep else None)
            self._asked = self._ask(base)
        else:
            self._asked = [(of["trial"], _as_flags(of["overrides"])) for of in saved["asked"]]
            if flags.study is not None:
                self._study = self._opened(base, flags.study, may=("steps",))
        try:
            self._named = list(self._names())
            self.variants: list[Varied] = checked_variants(base, [(name, over) for _, name, over in self._named])
        except ValueError:
            if saved is None:
                self.fail()
            raise

    @property
    def also(self) -> dict[str, Any]:
        """The trials, as a checkpoint keeps them."""
        return {"asked": [{"trial": number, "overrides": over} for number, over in self._asked]}

    def tell(self, race: Race, *, failed: bool = False) -> None:
        """Report the results of the sweep to the study. A trial that was trained to the end, or until it got no better, gets
        what variants are ranked by: its lowest log loss on the samples held out, or without these its recent mean loss. One
        that others beat is pruned at that step, with what it was beaten by: its mean loss in the first epoch, its lowest
        held-out log loss after it. So all that are pruned at one step have one measure. One that diverged has failed.

        **Arguments**

        - `race`: the race of all variants.
        - `failed`: whether all variants that have not left have diverged.
        """
        if self._study is None:
            return
        state = self._optuna.trial.TrialState
        told = {trial.number for trial in self._study.get_trials(deepcopy=False) if trial.state.is_finished()}
        places = {place.variant: place for place in race.standing()}
        left = {one.variant: one for one in race.left}
        for number, _ in self._asked:
            if number in told:  # by an earlier run of this sweep with fewer steps
                continue
            own = [name for trial, name, _ in self._named if trial == number]
            gone = [left[name] for name in own if name in left]
            beaten = [one.step for one in gone if one.kind != "patience"]
            by_losses = race.measure == "unseen" or (beaten and max(beaten) <= race.unseen)
            found = [places[name].loss if by_losses else places[name].held_out for name in own]
            losses = [loss for loss in found if loss is not None and isfinite(loss)]
            over = failed and not gone
            if over or len(losses) < len(own) or any(one.kind == "diverged" for one in gone):
                self._study.tell(number, state=state.FAIL)
            elif beaten:
                self._trial(number).report(sum(losses) / len(losses), max(beaten))
                self._study.tell(number, state=state.PRUNED)
            else:
                self._study.tell(number, sum(losses) / len(losses))

    def fail(self) -> None:
        """Mark the trials of the sweep as failed in the study."""
        if self._study is None:
            return
        for trial in self._study.get_trials(deepcopy=False):
            if trial.number in {number for number, _ in self._asked} and not trial.state.is_finished():
                self._study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)

    def _trial(self, number: int) -> Any:
        [frozen] = [trial for trial in self._study.get_trials(deepcopy=False) if trial.number == number]
        return self._optuna.trial.Trial(self._study, frozen._trial_id)

    def _opened(self, base: Recipe, where: str | None, may: Sequence[str] = ()) -> Any:
        """Open or create the study. Raise if it is of a sweep that differs in anything but `may`."""
        optuna, storage = self._optuna, None
        with _quiet(optuna):
            if where is not None and "://" in where:
                storage = where
            elif where is not None:
                Path(where).parent.mkdir(parents=True, exist_ok=True)
                storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(where))
            study = optuna.create_study(study_name=NAME, storage=storage, direction="minimize", load_if_exists=True)
            own, theirs = _about(base, self._spaces), study.user_attrs.get(OURS)
            if theirs is None and study.get_trials(deepcopy=False):
                raise ValueError(
                    f"study is {where!r}, which has trials that skirl did not make: set study to another file or URL"
                )
            if theirs is None:
                study.set_user_attr(OURS, own)
            elif others := [n for n in own | theirs if own.get(n) != theirs.get(n) and n not in may]:
                name = min(others, key=lambda name: (name != "search", name))
                raise ValueError(
                    f"study is {where!r}, which belongs to a sweep with {name} {theirs.get(name)}, and this one has "
                    f"{own.get(name)}: set {name} as it was there, or study to another file or URL"
                )
            seed = base.data.seed + len(study.get_trials(deepcopy=False))
            samplers = optuna.samplers
            kinds = {
                "tpe": lambda: samplers.TPESampler(seed=seed, constant_liar=True),
                "random": lambda: samplers.RandomSampler(seed=seed),
                "qmc": lambda: samplers.QMCSampler(seed=seed, scramble=True),
            }
            study.sampler = kinds[self._flags.sampler]()
        return study

    def _ask(self, base: Recipe) -> list[tuple[int, dict[str, Any]]]:
        """Ask for the wanted number of different trials."""
        found: list[tuple[int, dict[str, Any]]] = []
        assert self._flags.trials is not None
        with _quiet(self._optuna):
            for _ in range(_ASKED * self._flags.trials):
                if len(found) == self._flags.trials:
                    break
                trial = self._study.ask()
                drawn = {space.name: self._drawn(trial, space) for space in self._spaces}
                if any(drawn == other for _, other in found):
                    self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
                else:
                    found.append((trial.number, drawn))
        if len(found) < self._flags.trials:
            for number, _ in found:
                self._study.tell(number, state=self._optuna.trial.TrialState.FAIL)
            raise ValueError(
                f"trials is {self._flags.trials}, but {_ASKED * self._flags.trials:,} draws gave only {len(found)} "
                "different ones: set trials lower, or widen the search"
            )
        return found

    @staticmethod
    def _drawn(trial: Any, space: Space) -> Any:
        if space.choices:  # as text, because Optuna cannot keep a list of sizes
            texts = [text_of({"": choice})[1:] for choice in space.choices]
            return space.choices[texts.index(trial.suggest_categorical(space.name, texts))]
        draw = trial.suggest_int if space.whole else trial.suggest_float
        return draw(space.name, space.low, space.high, log=space.log)

    def _names(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Yield the trial of each variant, its name with values of four digits, and its overrides."""
        known: set[str] = set()
        for number, drawn in self._asked:
            short = text_of({name: _short(value) for name, value in drawn.items()})
            if short in known:
                short = f"{short},trial={number}"
            known.add(short)
            for seed in self._seeds or [None]:
                own = {} if seed is None else {"seed": seed}
                yield number, ",".join(filter(None, [short, text_of(own)])), drawn | own


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _as_flags(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides read from JSON with the types of their flags, such as tuples instead of lists."""
    known = flags_of(Recipe)
    return {name: read_as(known[name].type, value) for name, value in overrides.items()}


def _about(base: Recipe, spaces: Sequence[Space]) -> dict[str, Any]:
    """Return the facts that two sweeps must share to use one study."""
    parts = {part.name: getattr(base, part.name) for part in fields(base) if part.name not in _FREE}
    flags = {flag.name: getattr(owner, flag.name) for owner in parts.values() for flag in fields(owner)}
    drawn = {space.name for space in spaces}
    told = {n: str(v) for n, v in flags.items() if n not in drawn and n not in ("seed", "data_seed", "workers")}
    return told | {"search": " ".join(sorted(space.text for space in spaces))}


def _optuna() -> Any:
    try:
        optuna = import_module("optuna")
    except ImportError:
        raise ValueError(MISSING) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Suppress Optuna's warnings about experimental features."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield
