"""Optuna's pruners over losses that are known, beside our race: what they cost, and how good their winner is."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from skirl.sweep.bench_race import Truth

REPORTS = 50
"""Times in a run that each trial says its loss: the mean of the last half of its batches, as our race has it."""
ORDERS = 3
"""Orders of the trials that a figure is the mean of."""


def pruned(found: Truth) -> dict[str, dict[str, float]]:
    """Of each pruner, with trials one after the other and all at once: its cost, and its regret.

    **Arguments**

    - `found`: the losses of all.
    """
    optuna = import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruners = optuna.pruners
    kinds: dict[str, Callable[[], Any]] = {
        "median": lambda: pruners.MedianPruner(),
        "halving": lambda: pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
        "hyperband": lambda: pruners.HyperbandPruner(min_resource=1, max_resource=REPORTS, reduction_factor=3),
    }
    told = _reports(found)
    figures = {}
    for name, make in kinds.items():
        for way, race in (("", _one_after_another), ("_at_once", _at_once)):
            costs, regrets = [], []
            for order in range(ORDERS):
                # its hash says which of its brackets a trial is in
                study = optuna.create_study(study_name=f"{name}-{order}", pruner=make())
                turns = np.random.default_rng(order).permutation(len(found.names))
                reports, winner = race(optuna, study, told[turns])
                costs.append(reports / told.size)
                final = found.final[turns]
                regrets.append(float(final[winner] / final.min() - 1.0))
            figures[f"{name}{way}"] = {"cost": float(np.mean(costs)), "regret": float(np.mean(regrets))}
    return figures


def _reports(found: Truth) -> np.ndarray:
    """[variants, REPORTS]."""
    losses = found.losses
    ends = np.linspace(0, losses.shape[1], REPORTS + 1).astype(int)[1:]
    return np.stack([losses[:, end // 2 : end].mean(1) for end in ends], axis=1)


def _one_after_another(optuna: Any, study: Any, told: np.ndarray) -> tuple[int, int]:
    """Reports in all, and which trial won: as a study is used where one machine trains one trial at a time."""
    spent = 0
    for losses in told:
        trial = study.ask()
        pruned = False
        for number, loss in enumerate(losses, start=1):
            trial.report(float(loss), number)
            spent += 1
            if number < len(losses) and trial.should_prune():
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                pruned = True
                break
        if not pruned:
            study.tell(trial, float(losses[-1]))
    return spent, study.best_trial.number


def _at_once(optuna: Any, study: Any, told: np.ndarray) -> tuple[int, int]:
    """The same with all trials beside each other, as those of a sweep are."""
    trials = {n: study.ask() for n in range(len(told))}
    spent = 0
    for number in range(1, told.shape[1] + 1):
        for n, trial in trials.items():
            trial.report(float(told[n, number - 1]), number)
            spent += 1
        if number == told.shape[1]:
            break
        for n in [n for n, trial in trials.items() if len(trials) > 1 and trial.should_prune()]:
            if len(trials) > 1:
                study.tell(trials.pop(n), state=optuna.trial.TrialState.PRUNED)
    for n, trial in trials.items():
        study.tell(trial, float(told[n, -1]))
    return spent, study.best_trial.number
