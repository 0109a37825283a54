"""Claim: variants on one stream train in less time than alone, and a race finds a good one for a tenth of the steps.

Part speed: 8 variants of `skirl sweep` against single runs, one after the other and one per core at a time. All runs of a
cell warm up, each in its own process, for at least `timed` steps and until their windows have stopped growing; then they
take turns of `timed` steps while the others wait. Part race: all variants of a grid are trained to the end once for the
truth, with several seeds, then races are replayed over their losses.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any, Literal

import numpy as np

from common import Bench, Stopwatch, in_turns, main, printed, ratio, result, started
from skirl.peers.base import Alone
from skirl.pipeline.lookahead import lookahead
from skirl.sweep.entrant import sweep_of
from skirl.sweep.fused import MEASURED
from skirl.sweep.race import Race
from skirl.sweep.ranks import Ranks, how_many, share_of
from skirl.sweep.run import SweepRun
from skirl.sweep.variants import KeepFlags, RaceFlags, Varied, checked_variants, text_of
from skirl.tools.machine import cores
from skirl.train.flags import EvaluationFlags, LogFlags
from skirl.train.loop import steps
from skirl.train.metrics import Meter
from skirl.train.recipe import Recipe
from sweep_exact import exact
from sweep_memory import memory, overlap, spread

ENDLESS = 1_000_000
"""More steps than any run takes: it is stopped earlier."""
SETTLED = 10
"""Steps without growth after which the window counts as settled."""
ROW_RATES = (0.003, 0.006, 0.01, 0.02, 0.03, 0.06, 0.1, 0.2)
"""Learning rates of rows for 32 variants; 16 variants use every second one."""
DENSE_RATES = (0.0003, 0.001, 0.003, 0.01)
RUNGS = {16: (0.05, 0.1, 0.2, 0.3), 32: (0.04, 0.08, 0.13, 0.2, 0.3)}
"""By the number of variants: the rungs, as shares of the stream."""


@dataclass(frozen=True)
class Sweep(Bench):
    """Time variants on one stream against the same runs alone, and count what a race of variants costs."""

    part: Literal["race", "wall", "speed", "memory", "overlap", "exact"] = "race"
    """race: steps and regret of races of 16 and 32 variants. wall: the time of `skirl sweep` for the first of these, with a
    process for each core, against 16 times that of `skirl train`. speed: time of steps against single runs.
    memory: variants and time under a limit. overlap: what packs wait for their link. exact: random sweeps against lone
    runs, and planted faults."""
    cases: int = 300
    """Random sweeps of part exact."""
    data: str = "synthetic:criteo-kaggle"
    """The data, as `skirl train` takes it."""
    rows: str | None = None
    """Rows of each table, as `skirl train` takes them."""
    model: str = "dlrm-tiny"
    """The model."""
    dim: int = 8
    """Numbers of a row."""
    batch: int = 128
    """Samples of a batch."""
    steps: int = 1000
    """Batches of synthetic data that races are over; files are read to their end."""
    seeds: int = 5
    """How often all variants are trained to the end, for part race."""
    together: int = 8
    """How many variants train on one stream, for part speed."""
    timed: int = 30
    """Steps of a turn, for part speed."""
    repeats: int = 5
    """Turns of each run, for parts speed and wall; medians are reported."""

    def run(self) -> dict[str, Any]:
        parts = {
            "race": self._race,
            "wall": self._wall,
            "speed": self._speed,
            "memory": lambda: memory(Recipe.of(**self._flags(self.steps))),
            "overlap": overlap,
            "exact": lambda: exact(self.cases),
        }
        return result("sweep", self, "part data rows model dim batch", **parts[self.part]())

    def _flags(self, steps: int | None, **more: Any) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("data", "rows", "model", "dim", "batch")}
        return own | {"cache": "100%", "threads": 1, "steps": steps, **more}

    @property
    def _whole(self) -> dict[str, Any]:
        return self._flags(self.steps if self.data.startswith("synthetic:") else None)

    def _wall(self) -> dict[str, Any]:
        words = [f"--{name}={value}" for name, value in self._whole.items() if value is not None]
        rates = {"lr": ROW_RATES[::2], "dense-lr": DENSE_RATES}
        race = [f"--vary={name}={','.join(map(str, each))}" for name, each in rates.items()]
        race += ["--rungs=" + ",".join(f"{share:.0%}" for share in RUNGS[16]), f"--processes={cores()}"]
        sides = {"train": words, "sweep": [*words, *race]}

        def ran(command: str) -> None:
            printed(started(["-m", "skirl", command, *sides[command], "--run=none", "--quiet", "--json"]))

        took = in_turns({command: partial(ran, command) for command in sides}, self.repeats)
        alone, raced = ([one.seconds for one in of] for of in took.values())
        return {"vs_lone": 16 * ratio(alone, raced), "lone": median(alone), "raced": median(raced)}

    def _race(self) -> dict[str, Any]:
        recipe = Recipe.of(**self._whole)
        losses = [truth(recipe, grid(recipe, 32, seed)) for seed in range(self.seeds)]
        figures: dict[str, Any] = {"batches": len(next(iter(losses[0].values())))}
        for count in RUNGS:
            names = [variant.name for variant in grid(recipe, count)]
            found = raced([{name: of[name] for name in names} for of in losses], RUNGS[count])
            figures |= {f"{name}{'' if count == 16 else f'_{count}'}": value for name, value in found.items()}
        return figures

    def _speed(self) -> dict[str, Any]:
        at_once, count = cores(), self.together
        epochs = {} if self.data.startswith("synthetic:") else {"epochs": ENDLESS // 1000}
        flags = self._flags(ENDLESS, **epochs)
        with ExitStack() as stack:

            def begun(*runs: dict[str, Any], variants: int = 0) -> Turns:
                return stack.enter_context(Turns(self.timed, runs, variants))

            alone = {threads: begun(flags | {"threads": threads}) for threads in sorted({1, at_once})}
            ranks = how_many("auto", Recipe.of(**flags), count)
            side, own = begun(*[flags] * at_once), begun(*[flags] * ranks, variants=count)
            for _ in range(self.repeats):
                for one in (*alone.values(), side, own):
                    one.take()
        best = min(alone.values(), key=lambda one: median(one.seconds))
        return {
            "together": count, "timed": self.timed, "repeats": self.repeats,
            "vs_lone": count * ratio(best.seconds, own.seconds),
            "vs_side_by_side": count / at_once * ratio(side.seconds, own.seconds),
            "cpu_vs_lone": count * ratio(alone[1].cpu, own.cpu),
            "fused": own.fused,
        }  # fmt: skip


def grid(recipe: Recipe, count: int, seed: int = 0) -> list[Varied]:
    """Return 16 or 32 variants that differ in their learning rates."""
    rates = product(ROW_RATES[:: 32 // count], DENSE_RATES)
    overrides = [{"lr": lr, "dense_lr": dense} for lr, dense in rates]
    return checked_variants(recipe, [(text_of(each), {**each, "seed": seed}) for each in overrides])


def truth(recipe: Recipe, variants: Sequence[Varied]) -> dict[str, np.ndarray]:
    """Train all to the end. Return the losses of each, by batch, before it was trained on."""
    losses, sweep = [], sweep_of(recipe, variants)
    with sweep, lookahead(recipe.stream(), sweep, depth=recipe.cache.depth) as batches:
        for batch in batches:
            found = sweep.step(batch)
            losses.append([found.get(variant.name, np.inf) for variant in variants])
    return {variant.name: of for variant, of in zip(variants, np.array(losses).T, strict=True)}


def end_of(losses: np.ndarray) -> float:
    return float(losses[-max(1, len(losses) // 5) :].mean())


def raced(losses: Sequence[Mapping[str, np.ndarray]], shares: Sequence[float]) -> dict[str, Any]:
    """Replay a race over known losses of each seed. Return its cost, and how much worse its winner ends than the best, as
    means over seeds, beside how far two seeds of a variant end apart."""
    ends = np.array([[end_of(of) for of in seed.values()] for seed in losses])
    best, names = ends.mean(0).min(), [*losses[0]]
    winners = [replayed(seed, shares) for seed in losses]
    regrets = [ends[:, names.index(winner)].mean() / best - 1.0 for winner, _ in winners]
    return {
        "cost": winners[0][1], "winners": [winner for winner, _ in winners], "regret": float(np.mean(regrets)),
        "most_regret": max(regrets), "seed_noise": float((2 * ends.var(0, ddof=1).mean()) ** 0.5 / best),
    }  # fmt: skip


def replayed(losses: Mapping[str, np.ndarray], shares: Sequence[float]) -> tuple[str, float]:
    """Replay a race over known losses. Return its winner, and its cost."""
    each = np.array([*losses.values()]).T
    rungs = tuple(sorted({max(1, int(len(each) * share)) for share in shares}))
    race, spent = Race([*losses], rungs=rungs), 0
    for of_batch in each:
        spent += len(race.racing)
        race.see(of_batch.tolist())
    return race.standing()[0].variant, spent / each.size


class Turns:
    """Runs that train at the same time, each in a process, when it is their turn. A with-block warms them up."""

    def __init__(self, timed: int, runs: Sequence[dict[str, Any]], variants: int) -> None:
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.fused: float | None = None
        """Share of variants' steps in the last turn that were fused."""
        given = [json.dumps([flags, timed, variants, rank, len(runs)]) for rank, flags in enumerate(runs)]
        self._started = [started([__file__, "child", each], stdin=subprocess.PIPE) for each in given]

    def __enter__(self) -> "Turns":
        for one in self._started:
            self._line(one)  # it is warm
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._started:
            one.communicate()  # its input ends, so it does, and the processes that it started

    def take(self) -> None:
        for one in self._started:
            print("go", file=one.stdin, flush=True)
        found = [json.loads(self._line(one)) for one in self._started]
        self.seconds.append(max(one["seconds"] for one in found))
        self.cpu.append(sum(one["cpu"] for one in found))
        self.fused = found[0]["fused"]

    def _line(self, process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            self.__exit__()
            raise RuntimeError(f"a measuring process ended with exit code {process.wait()}; it said why above")
        return line


def turns_of(flags: dict[str, Any], timed: int, variants: int, rank: int, size: int) -> None:
    """Train in this process. For each line read, take a turn and print its figures as JSON."""
    recipe = Recipe.of(**flags)
    run = beside(recipe, variants, rank, size) if variants else alone(recipe)
    with run as (each, ahead, forms):
        last, same, number = -1, 0, 0
        while number < max(timed, MEASURED + 1) or same < SETTLED:
            next(each)
            same = same + 1 if ahead() <= last else 0
            last, number = max(last, ahead()), number + 1
        print("warm", flush=True)
        for _ in sys.stdin:
            before = Counter(forms)
            with Stopwatch() as watch:
                for _ in range(timed):
                    next(each)
            taken = Counter(forms) - before
            fused = taken["fused"] / max(1, taken.total())
            print(json.dumps({"seconds": watch.seconds, "cpu": watch.cpu, "fused": fused}), flush=True)


@contextmanager
def alone(recipe: Recipe) -> Iterator[Any]:
    """Yield a single run as `skirl train` has it: its steps, its window, and no steps of variants."""
    recipe.use_threads()
    embeddings = recipe.embeddings(recipe.cache_size(0))
    model, dense = recipe.model_over(embeddings)
    meter, rates = Meter(), recipe.rates_of(embeddings, dense)
    with recipe.lookahead(model) as batches:

        def trained() -> Iterator[None]:
            for done in steps(model, dense, batches, rates):
                meter.add(done.loss_tensor, done.logits, done.labels, samples=done.samples)
                yield

        yield trained(), lambda: batches.window, Counter()


@contextmanager
def beside(recipe: Recipe, count: int, rank: int, size: int) -> Iterator[Any]:
    """A rank's variants as `skirl sweep` trains them: metrics, and a race that nobody leaves."""
    own, logged = share_of(recipe, spread(recipe, count), rank, size), LogFlags(run="none", log_every=ENDLESS)
    flags = {"inexact": False, "memory": None}
    run = SweepRun(Ranks(Alone()), *own, RaceFlags(), KeepFlags(), logged, flags, EvaluationFlags())
    with run.opened():

        def trained() -> Iterator[None]:
            while run.leg():
                yield

        yield trained(), lambda: run.batches.window, run.sweep.forms.steps


if __name__ == "__main__":
    main(Sweep, turns_of)
