"""Optuna draws the variants of a sweep and is told how they ended: eight at a time train on one stream.

It needs `pip install optuna`. A trial whose variant was dropped at a rung is pruned, with its loss at that step. Optuna
draws the next eight from what it knows of all before.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import optuna
from optuna.trial import Trial, TrialState

SWEEPS, VARIANTS = 2, 8
FLAGS = "synthetic:tiny --model dlrm-tiny --dim 8 --batch 64 --steps 200 --rungs 20%,40% --run none --quiet --json"


def draw(trial: Trial) -> dict:
    """Return the flags of a variant."""
    return {
        "lr": trial.suggest_float("lr", 1e-3, 1.0, log=True),
        "dense_lr": trial.suggest_float("dense_lr", 1e-4, 1e-1, log=True),
        "optimizer": trial.suggest_categorical("optimizer", ["adagrad", "sgd"]),
    }


def sweep(variants: dict[str, dict]) -> dict[str, dict]:
    """Train variants on one stream, and return the place of each by its name."""
    lines = [
        [f"[{name}]", *(f"{flag} = {json.dumps(value)}" for flag, value in of.items())] for name, of in variants.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "variants.toml"
        path.write_text("\n".join(line for variant in lines for line in variant))
        words = [sys.executable, "-m", "skirl", "sweep", *FLAGS.split(), "--variants", str(path)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout)
    return {at["variant"]: at | {"steps": result["by_variant"][at["variant"]]["steps"]} for at in result["standing"]}


study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
for _ in range(SWEEPS):
    trials = [study.ask() for _ in range(VARIANTS)]
    places = sweep({f"trial-{trial.number}": draw(trial) for trial in trials})
    for trial in trials:
        place = places[f"trial-{trial.number}"]
        if place["loss"] is None or place["state"].startswith("diverged"):
            study.tell(trial, state=TrialState.FAIL)
        elif place["state"].startswith("dropped"):
            trial.report(place["loss"], place["steps"])
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, place["loss"])
    print(f"{len(study.trials)} trials, the best loss {study.best_value:.4f} with {study.best_params}")
