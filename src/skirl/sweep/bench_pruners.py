"""Replay Optuna's pruners over known losses, to compare their cost and their winner with those of our race."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from skirl.sweep.bench_race import Truth

REPORTS = 50
"""How often each trial reports its loss in a run: the mean over the last half of its batches, as in our race."""
ORDERS = 3
"""Each figure is a mean over this many orders of the trials."""


def pruned(found: Truth) -> dict[str, dict[str, float]]:
    """Return cost and regret of each pruner, with trials one after the other and all at once.

    **Arguments**

    - `found`: the losses of all variants.
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
                # Hyperband picks a trial's bracket by a hash of this name
                study = optuna.create_study(study_name=f"{name}-{order}", pruner=make())
                turns = np.random.default_rng(order).permutation(len(found.names))
                reports, winner = race(optuna, study, told[turns])
                costs.append(reports / told.size)
                final = found.final[turns]
                regrets.append(float(final[winner] / final.min() - 1.0))
            figures[f"{name}{way}"] = {"cost": float(np.mean(costs)), "regret": float(np.mean(regrets))}
    return figures


def _reports(found: Truth) -> np.ndarray:
    """Return the reported losses, [variants, REPORTS]."""
    losses = found.losses
    ends = np.linspace(0, losses.shape[1], REPORTS + 1).astype(int)[1:]
    return np.stack([losses[:, end // 2 : end].mean(1) for end in ends], axis=1)


def _one_after_another(optuna: Any, study: Any, told: np.ndarray) -> tuple[int, int]:
    """Run a study that trains one trial at a time. Return the total number of reports, and the winning trial."""
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
    """Do the same with all trials side by side, as in a sweep."""
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
