"""Time variants on one stream against the same runs alone, one after the other and one per core at a time."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from math import exp, log
from statistics import median
from typing import Any

from skirl.data.flags import FILE_KINDS
from skirl.measure.bench.helpers import Stopwatch
from skirl.tools.machine import cores
from skirl.train.recipe import Recipe

_ENDLESS = 1_000_000
"""More steps than any run takes: it is stopped earlier."""
_SETTLED = 10
"""Steps without growth after which the window counts as settled."""
_CODE = "from skirl.sweep.bench_speed import main; main()"


def speed(
    recipe: Recipe,
    *,
    variants: Sequence[int],
    models: Sequence[str],
    batches: Sequence[int],
    stores: Sequence[str],
    steps: int,
    repeats: int,
    processes: int | str = "auto",
) -> dict[str, Any]:
    """Time every cell; ratios are geometric means over them.

    All runs of a cell warm up, each in its own processes, for at least `steps` steps and until their windows have settled:
    from then on each step reads and plans one batch. Then they take turns of `steps` steps, while the others wait: a machine
    that slows down slows all of them. The same number of rows is cached for each variant.

    **Arguments**

    - `recipe`: gives the data, tables, cache and optimizer.
    - `variants`: numbers of variants that train together; all are compared with the same lone runs.
    - `models`, `batches`, `stores`: there is a cell for each combination of these and of `variants`.
    - `steps`: steps of a turn.
    - `repeats`: turns of each run; ratios are medians over turns.
    - `processes`: how many train the variants together, as in `skirl sweep`.
    """
    cells = [
        cell
        for model, batch, store in product(models, batches, stores)
        for cell in _cells(recipe, variants, model, batch, store, steps, repeats, processes)
    ]
    return {
        "variants": list(variants),
        "steps": steps,
        "repeats": repeats,
        "vs_lone": _mean([cell["vs_lone"] for cell in cells]),
        "vs_side_by_side": _mean([cell["vs_side_by_side"] for cell in cells]),
        "cpu_vs_lone": _mean([cell["cpu_vs_lone"] for cell in cells]),
        "least": min(min(cell["vs_lone"], cell["vs_side_by_side"]) for cell in cells),
        "cells": cells,
    }


def _mean(ratios: Sequence[float]) -> float:
    return exp(sum(map(log, ratios)) / len(ratios))


def _cells(
    recipe: Recipe,
    counts: Sequence[int],
    model: str,
    batch: int,
    store: str,
    steps: int,
    repeats: int,
    processes: int | str,
) -> list[dict[str, Any]]:
    at_once = cores()
    flags = recipe.flat() | {"model": model, "batch": batch, "steps": _ENDLESS, "threads": 1}
    flags |= {"epochs": _ENDLESS // 1000} if recipe.data.kind in FILE_KINDS else {}
    with ExitStack() as stack:

        def begun(*runs: dict[str, Any], variants: int = 0) -> _Turns:
            return stack.enter_context(_Turns(runs, store, steps, variants, processes))

        alone = {threads: begun(flags | {"threads": threads}) for threads in sorted({1, at_once})}
        side = begun(*[flags] * at_once)
        together = {count: begun(flags, variants=count) for count in counts}
        for _ in range(repeats):
            for one in (*alone.values(), side, *together.values()):
                one.take()
    best = min(alone, key=lambda threads: median(alone[threads].seconds))
    return [
        {
            "model": model,
            "batch": batch,
            "store": store,
            "variants": count,
            "seconds": median(ours.seconds),
            "spread": max(ours.seconds) / min(ours.seconds),
            "lone": {str(threads): median(one.seconds) for threads, one in alone.items()},
            "side_by_side": median(side.seconds),
            "form": ours.form,
            "vs_lone": count * _median_ratio(alone[best].seconds, ours.seconds),
            "vs_side_by_side": count / at_once * _median_ratio(side.seconds, ours.seconds),
            "cpu_vs_lone": count * _median_ratio(alone[1].cpu, ours.cpu),
        }
        for count, ours in together.items()
    ]


def _median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return median(a / b for a, b in zip(over, under, strict=True))


class _Turns:
    """Runs that train at the same time, each in a process of its own, when it is their turn. A with-block warms them up.

    **Arguments**

    - `runs`: the flags of each run.
    - `store`: "memory" or "disk".
    - `steps`: steps of a turn.
    - `variants`: number of variants that train together; 0 for a lone run.
    - `processes`: number of processes that train them.
    """

    def __init__(
        self, runs: Sequence[dict[str, Any]], store: str, steps: int, variants: int = 0, processes: int | str = 1
    ) -> None:
        self._jobs = [{"flags": flags, "steps": steps, "variants": variants, "processes": processes} for flags in runs]
        self._store = store
        self._started: list[subprocess.Popen[str]] = []
        self.seconds: list[float] = []
        """Seconds of each turn, until the last run was done."""
        self.cpu: list[float] = []
        """CPU seconds of each turn, of all runs."""
        self.form: str | None = None
        """How the variants were trained together."""

    def __enter__(self) -> "_Turns":
        self._folder = tempfile.TemporaryDirectory(prefix="skirl-bench-")
        try:
            for number, job in enumerate(self._jobs):
                rows = "memory" if self._store == "memory" else f"disk:{self._folder.name}/{number}"
                text = json.dumps(job | {"flags": job["flags"] | {"store": rows}})
                self._started.append(
                    subprocess.Popen(
                        [sys.executable, "-c", _CODE, text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                    )
                )
            for one in self._started:
                _line(one)  # the run says that it is warm
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for one in self._started:
            one.kill()
            one.communicate()
        self._folder.cleanup()

    def take(self) -> None:
        """Let all train their steps at the same time."""
        for one in self._started:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        found = [json.loads(_line(one)) for one in self._started]
        self.seconds.append(max(one["seconds"] for one in found))
        self.cpu.append(sum(one["cpu"] for one in found))
        self.form = found[0].get("form")


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a measuring process ended with exit code {process.wait()}; it said why above")
    return line


def main() -> None:
    """Train in this process, started by `_Turns`. For each line read, print the figures of a turn as JSON."""
    job = json.loads(sys.argv[1])
    flags = {name: tuple(value) if isinstance(value, list) else value for name, value in job["flags"].items()}
    recipe, steps, variants = Recipe.of(**flags), job["steps"], job["variants"]
    with _beside(recipe, variants, job["processes"]) if variants else _alone(recipe) as run:
        _warm_up(run, steps)
        print("ready", flush=True)
        for _ in sys.stdin:
            before = run.others()
            with Stopwatch() as watch:
                for _ in range(steps):
                    next(run.steps)
            cpu = watch.cpu + run.others() - before
            print(json.dumps({"seconds": watch.seconds, "cpu": cpu, **run.facts()}), flush=True)


@dataclass(frozen=True)
class _Run:
    """A run that goes on step by step."""

    steps: Iterator[Any]
    window: Callable[[], int]
    """Steps read ahead, summed over all processes."""
    others: Callable[[], float] = lambda: 0.0
    """CPU seconds of other processes."""
    facts: Callable[[], dict[str, Any]] = dict


def _warm_up(run: _Run, steps: int) -> None:
    """Take at least `steps` steps, and go on until the window has stopped growing."""
    last, same = -1, 0
    for number, _ in enumerate(run.steps, 1):
        window = run.window()
        same = same + 1 if window <= last else 0
        last = max(last, window)
        if number >= steps and same >= _SETTLED:
            return
    raise ValueError("the data ended while a run warmed up: set steps higher, or take more data")


@contextmanager
def _alone(recipe: Recipe) -> Iterator[_Run]:
    """A lone run as `skirl train` has it, metrics included."""
    from skirl.train.loop import steps
    from skirl.train.meter import Meter

    recipe.use_threads()
    embeddings = recipe.embeddings(recipe.cache_size(0))
    model, dense = recipe.model_over(embeddings)
    meter, rates = Meter(recipe.stream().lists), recipe.rates_of(embeddings, dense)
    with recipe.lookahead(model) as batches:

        def trained() -> Iterator[None]:
            for done in steps(model, dense, batches, rates):
                meter.add(done.loss_tensor, done.logits, done.labels, samples=done.samples)
                yield

        yield _Run(trained(), lambda: batches.window)


@contextmanager
def _beside(recipe: Recipe, count: int, processes: int | str) -> Iterator[_Run]:
    """The variants as `skirl sweep` trains them: metrics, and a race that nobody leaves."""
    from skirl.sweep.crew import Crew, Duty
    from skirl.sweep.crews import Crews, duties, how_many
    from skirl.sweep.race import Race
    from skirl.sweep.rules import Rules
    from skirl.sweep.variants import Varied

    rates = [recipe.rates.lr * (1 + n / count) for n in range(count)]
    variants = [
        Varied(f"lr-{n}", {"lr": lr}, recipe=replace(recipe, rates=replace(recipe.rates, lr=lr)))
        for n, lr in enumerate(rates)
    ]
    race = Race([variant.name for variant in variants], rules=Rules(alpha=0.0))
    duty = Duty(recipe, variants, _ENDLESS, lambda name: "none", {})
    used = how_many(processes, recipe, count, trace=False)
    crew = Crew(duty) if used == 1 else Crews(duties(duty, race, used))
    with crew:
        crew.begin(None, None)

        def trained() -> Iterator[None]:
            while (done := crew.step()) is not None:
                race.see([done.losses[name] for name in race.names])
                crew.end_step(last=False)
                yield

        form = (lambda: f"{used} processes") if isinstance(crew, Crews) else (lambda: crew.sweep.form)
        others = (lambda: crew.facts()["cpu_seconds"]) if isinstance(crew, Crews) else (lambda: 0.0)
        yield _Run(trained(), crew.window, others, lambda: {"form": form()})
