"""Training speed of skirl against other modes, which take turns in one process on one stream of batches."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from skirl.data.flags import SESSIONS
from skirl.measure.bench.helpers import at_least_one
from skirl.tools.machine import machine
from skirl.train.recipe import Recipe

if TYPE_CHECKING:
    from skirl.measure.bench.modes import Mode, ModeSettings, Slice
    from skirl.store import Link

FAMILY = ("skirl", "serial", "resident", "lru", "on_demand")
"""Modes that use skirl's own kernels; their losses agree to the last bit."""
AGREE = 1e-3
"""Relative difference of losses allowed for other orders of summation; it was 1.4e-4 after 500 steps of 64 samples."""
RATIOS = {
    "vs_resident": "resident",
    "vs_torch": "torch",
    "vs_fbgemm": "fbgemm",
    "vs_on_demand": "on_demand",
    "vs_lru": "lru",
}


@dataclass(frozen=True)
class TrainSpeed:
    """Samples per second of skirl, and of all rows resident, torch, FBGEMM, an LRU cache and rows on demand."""

    common: ClassVar[tuple[str, ...]] = (
        "model", "data", "dim", "batch", "cache", "depth", "store", "link", "modes", "threads",
    )  # fmt: skip
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "training": ("prefetch", "lr", "seed", "device", "rows_scale"),
        "timing": ("warm", "slice", "rounds"),
        "output": ("json",),
    }

    model: Literal["tiny", "dlrm"] = "tiny"
    """The model: dlrm has the sizes of the paper, tiny a few thousand weights."""
    data: str = "synthetic:criteo-kaggle"
    """Where batches come from: synthetic:NAME, where NAME is tiny, avazu, criteo-kaggle or criteo-terabyte."""
    dim: int = 16
    """Numbers in a row."""
    batch: int = 2048
    """Samples in a step."""
    cache: str = "touched:10%"
    """Rows on the device, for skirl and the LRU cache: a number, or a share of the rows that the run touches."""
    depth: int = 64
    """Batches that the oracle reads ahead."""
    prefetch: int = 2
    """Number of steps ahead that rows are fetched."""
    store: str = "memory"
    """Where the rows outside the cache are: memory, or disk:FOLDER, where each mode gets a folder that is removed at
    the end."""
    link: str | None = None
    """Emulate a link between cache and store: RATE,DELAY such as 1Gbit,100us."""
    warm: int = 48
    """Steps before the first slice."""
    slice: int = 12
    """Steps of a mode before the next one takes its turn."""
    rounds: int = 8
    """Turns of each mode."""
    modes: str = ""
    """The modes to run, separated by commas; all if not given: skirl, serial, resident, torch, fbgemm, lru, on_demand."""
    lr: float = 0.05
    """Learning rate of rows and dense weights; both use SGD."""
    seed: int = 0
    """Seed of the data, the initial rows and the initial weights."""
    device: str = "cpu"
    """Where rows are cached and the model computes: cpu, cuda, cuda:N or interpret. FBGEMM's operator runs on cpu
    only."""
    threads: int | None = None
    """Compute threads, the same for all modes; torch's choice if not given."""
    rows_scale: float = 1.0
    """Multiply the number of rows of each synthetic table by this."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        at_least_one(self, "warm", "slice", "rounds", "depth", "dim")
        for name in self.names:
            if name not in (*FAMILY, "torch", "fbgemm"):
                raise ValueError(f"modes has {name!r}: set it to some of {', '.join((*FAMILY, 'torch', 'fbgemm'))}")
        recipe = self._recipe(1)
        if not recipe.counts_first and not self.cache.strip().isdigit():
            raise ValueError(f"cache is {self.cache!r}: set it to a number of rows or to a share like touched:10%")
        if recipe.data.path == SESSIONS and recipe.data.kind == "synthetic":
            raise ValueError(
                f"data is {self.data!r}, whose samples share lists, which the other libraries do not support: set data to "
                "another, or run `python benchmarks/dedup.py`"
            )

    @property
    def names(self) -> list[str]:
        """The modes to run."""
        given = [name.strip() for name in self.modes.split(",") if name.strip()]
        return given or ["skirl", "serial", "resident", "torch", "fbgemm", "lru", "on_demand"]

    def run(self) -> dict[str, Any]:
        """Run all modes in turns and return their figures and ratios."""
        from skirl.measure.bench.stalls import Waits

        setting, rows_a_batch = self._setting()
        made: dict[str, Mode] = {}
        slices: dict[str, list[Slice]] = {}
        warm_losses: dict[str, list[float]] = {}
        waits: dict[str, dict[str, float]] = {}
        try:
            for name in self.names:
                mode = self._make(name, setting)
                if mode is not None:
                    made[name], slices[name] = mode, []
                    warm_losses[name] = mode.slice(self.warm).losses
            for number in range(self.rounds):
                order = list(made) if number % 2 else list(made)[::-1]
                for name in order:
                    slices[name].append(made[name].slice(self.slice))
            for name, mode in made.items():  # apart from the timed rounds
                with Waits() as watch:
                    mode.slice(self.slice)
                waits[name] = watch.summary()
        finally:
            for mode in made.values():
                mode.close()
            if setting.store.startswith("disk:"):
                for name in made:
                    shutil.rmtree(Path(setting.store.removeprefix("disk:")) / name, ignore_errors=True)
        losses = {name: warm_losses[name] + [x for s in slices[name] for x in s.losses] for name in made}
        measured = rows_a_batch[self.warm : self.warm + self.slice * self.rounds]
        result = self._result(setting, slices, losses, round(sum(measured) / len(measured)))
        check = id_check(setting)
        share = round(check / (1e3 * result["modes"]["skirl"]["ms_per_step"]), 5) if "skirl" in made else None
        return result | {"interpreter_waits": waits, "id_check": {"us_per_step": round(check, 1), "share": share}}

    def _recipe(self, batches: int) -> Recipe:
        """Return a recipe of `skirl train` with the same flags, which checks them."""
        model: Any = {"tiny": "dlrm-tiny"}.get(self.model, self.model)
        return Recipe.of(
            data=self.data, model=model, optimizer="sgd", lr=self.lr, dim=self.dim, batch=self.batch, steps=batches,
            cache=self.cache, depth=self.depth, prefetch=self.prefetch, store=self.store, link=self.link, seed=self.seed,
            threads=self.threads, rows_scale=self.rows_scale, device=self.device,
        )  # fmt: skip

    def _setting(self) -> "tuple[ModeSettings, list[int]]":
        from skirl.core.tables import Schema
        from skirl.measure.bench.modes import ModeSettings, rows_of
        from skirl.store import Link

        # The window must stay full to the end: planning without entering batches would flatter the last rounds.
        recipe = self._recipe(self.warm + self.slice * (self.rounds + 1) + self.depth + self.prefetch + 8)
        recipe.use_threads()
        stream = recipe.stream()
        batches = list(stream)
        touched, rows_a_batch = rows_of(batches, Schema.of(recipe.tables()))
        setting = ModeSettings(
            model=self.model, tables=recipe.tables(), dense_features=stream.dense_features, batches=batches, lr=self.lr,
            seed=self.seed, depth=self.depth, prefetch=self.prefetch, cache=int(recipe.cache_size(touched)),
            touched=touched, largest=max(rows_a_batch), link=Link.parse(self.link) if self.link else Link(),
            store=self.store, device=self.device,
        )  # fmt: skip
        return setting, rows_a_batch

    def _make(self, name: str, setting: "ModeSettings") -> "Mode | None":
        from skirl.measure.bench.modes import (
            Mode,
            OnDemand,
            TorchTables,
            WithLookahead,
            WithoutLookahead,
            fbgemm_or_none,
        )

        match name:
            case "torch":
                return Mode(setting, TorchTables(setting.tables, setting.seed))
            case "fbgemm":
                return fbgemm_or_none(setting) if self.device == "cpu" else None
            case "lru":
                return WithoutLookahead(setting, name)
            case "on_demand":
                return WithoutLookahead(setting, name, OnDemand)
            case _:
                return WithLookahead(setting, name, resident=name == "resident", serial=name == "serial")

    def _result(
        self, setting: "ModeSettings", slices: "dict[str, list[Slice]]", losses: dict[str, list[float]], rows: int
    ) -> dict[str, Any]:
        slices = quietest(slices)
        seconds = {name: [s.seconds for s in turns] for name, turns in slices.items()}
        cores = machine()["cores"]
        roofs = self._roofs(setting, slices, cores)
        spread = difference(losses)
        skirl = next(iter(slices.values()))
        result: dict[str, Any] = {
            "bench": "train",
            "model": self.model, "data": self.data, "dim": self.dim, "batch": self.batch, "cache": self.cache,
            "cache_rows": setting.cache, "touched": setting.touched, "rows_a_batch": rows,
            "depth": self.depth, "prefetch": self.prefetch, "store": self.store.partition(":")[0], "link": self.link,
            "device": self.device,
            "steps": self.slice * len(skirl), "rounds": self.rounds, "seed": self.seed,
        }  # fmt: skip
        for key, name in RATIOS.items():
            result[key] = paired(seconds.get(name), seconds.get("skirl"))
        moved = {name: sum(s.received + s.sent for s in turns) for name, turns in slices.items()}
        result["byte_ratio_on_demand"] = ratio(moved.get("on_demand"), moved.get("skirl"))
        result["vs_roof"] = paired(roofs, seconds.get("skirl"))
        result["serial_vs_roof"] = paired(seconds.get("serial"), roofs)
        result["hidden"] = hidden(seconds.get("serial"), seconds.get("skirl"), roofs)
        result["roof"] = self._roof_parts(setting, slices, cores)
        result["losses_agree"] = agree(losses)
        result["loss_difference"] = spread
        ids = self.batch * len(setting.tables)
        result["modes"] = {
            name: {
                "samples_per_s": round(self.batch * self.slice / median(seconds[name])),
                "ms_per_step": round(1e3 * median(seconds[name]) / self.slice, 3),
                "bytes_received": sum(s.received for s in turns),
                "bytes_sent": sum(s.sent for s in turns),
                "calls": sum(s.calls for s in turns),
                "cpu_ns_id": round(1e9 * median(s.cpu for s in turns) / self.slice / ids, 1),
                "cpu_ns_row": round(1e9 * median(s.cpu for s in turns) / self.slice / rows, 1),
                "others": round(median(s.others for s in turns), 2),
            }
            for name, turns in slices.items()
        }
        missing = [name for name in self.names if name not in slices]
        why = "not installed" if self.device == "cpu" else f"not installed, or not for {self.device}"
        result["missing"] = f"{', '.join(missing)}: {why}" if missing else None
        result["machine"] = machine()
        result["failed"] = None if result["losses_agree"] else f"losses differ: {spread}"
        return result

    def _roofs(self, setting: "ModeSettings", slices: "dict[str, list[Slice]]", cores: int) -> list[float] | None:
        """Return the seconds that no pipeline could beat, for each round."""
        if "skirl" not in slices or "resident" not in slices:
            return None
        return [
            max(resident.seconds, wire(setting.wire or setting.link, mine), mine.cpu / cores)
            for mine, resident in zip(slices["skirl"], slices["resident"])
        ]

    def _roof_parts(
        self, setting: "ModeSettings", slices: "dict[str, list[Slice]]", cores: int
    ) -> dict[str, float] | None:
        """Return the milliseconds per step of each part that may be the roof."""
        if "skirl" not in slices or "resident" not in slices:
            return None
        parts = {
            "compute": [s.seconds for s in slices["resident"]],
            "wire": [wire(setting.wire or setting.link, s) for s in slices["skirl"]],
            "cpu": [s.cpu / cores for s in slices["skirl"]],
        }
        return {name: round(1e3 * median(values) / self.slice, 3) for name, values in parts.items()}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as text for a reader, by label."""
        facts = {
            "run": f"{result['model']}, {result['steps']} steps of {self.batch:,}, dim {self.dim}, cache of "
            f"{result['cache_rows']:,} of {result['touched']:,} touched rows, {result['store']}, link {self.link or 'none'}"
        }
        for name, mode in result["modes"].items():
            moved = (mode["bytes_received"] + mode["bytes_sent"]) / result["steps"] / 1e6
            facts[name] = (
                f"{mode['samples_per_s']:>10,} samples/s {mode['ms_per_step']:>9.2f} ms a step {moved:>8.2f} MB moved "
                f"{mode['cpu_ns_id']:>7.1f} ns of CPU an id, others {mode['others']:.1f} cores"
            )
        for name in (*RATIOS, "byte_ratio_on_demand", "vs_roof", "serial_vs_roof", "hidden"):
            facts[name] = "-" if result[name] is None else f"{result[name]:.2f}"
        facts["roof"] = json.dumps(result["roof"])
        check = result["id_check"]
        of_step = "-" if check["share"] is None else f"{check['share']:.2%} of a step"
        facts["ids compared"] = f"{check['us_per_step']:.0f} us, {of_step}"
        facts["losses agree"] = f"{result['losses_agree']} ({json.dumps(result['loss_difference'])})"
        for name, wait in result["interpreter_waits"].items():
            facts[f"GIL, {name}"] = (
                f"a thread waits {wait['mean_us']:.0f} us on average, {wait['p99_us']:.0f} at worst 1%"
            )
        if result["missing"]:
            facts["missing"] = result["missing"]
        return facts


def id_check(setting: "ModeSettings") -> float:
    """Return the microseconds per step for checking that forward gets its batch: hash ids when read, compare later."""
    from skirl.core.id_hash import hashes_of
    from skirl.core.ids import capture
    from skirl.core.tables import Schema
    from skirl.nn.same_batch import SameBatch

    features = Schema.of(setting.tables).features
    same, took = SameBatch(features), []
    for batch in setting.batches[:50]:
        captured = capture(batch.sparse, features, copy=False)
        begin = perf_counter()
        captured.hashes = hashes_of(captured)
        same.check(batch.sparse, captured, list)
        took.append(perf_counter() - begin)
    return 1e6 * median(took)


def quietest(slices: "dict[str, list[Slice]]") -> "dict[str, list[Slice]]":
    """Return the half of the rounds in which other processes took the least CPU time. Ratios play no part in the choice."""
    rounds = range(len(next(iter(slices.values()))))
    others = [sum(turns[i].others * turns[i].seconds for turns in slices.values()) for i in rounds]
    chosen = sorted(sorted(rounds, key=lambda i: others[i])[: (len(rounds) + 1) // 2])
    return {name: [turns[i] for i in chosen] for name, turns in slices.items()}


def wire(link: "Link", moved: "Slice") -> float:
    """Return the seconds that a slice's bytes take on the link in the busier direction."""
    return max(moved.received, moved.sent) / link.rate


def paired(above: list[float] | None, below: list[float] | None) -> float | None:
    """Return the median over rounds of the ratio above / below.

    >>> paired([2.0, 4.0, 90.0], [1.0, 2.0, 30.0])
    2.0
    """
    if not above or not below:
        return None
    return round(median(a / b for a, b in zip(above, below, strict=True)), 4)


def ratio(above: int | None, below: int | None) -> float | None:
    """Return the ratio of two counts, or None if it is undefined."""
    return None if above is None or not below else round(above / below, 4)


def hidden(serial: list[float] | None, mine: list[float] | None, roofs: list[float] | None) -> float | None:
    """Return the share of hideable time that was hidden. Uses medians, since one round's difference may be near zero.

    >>> hidden([3.0], [1.2], [1.0])
    0.9
    """
    if not serial or not mine or not roofs or median(serial) <= median(roofs):
        return None
    return round((median(serial) - median(mine)) / (median(serial) - median(roofs)), 4)


def difference(losses: dict[str, list[float]]) -> dict[str, float]:
    """Return the maximum relative difference of each mode's losses from the first mode's; NaN if a loss is NaN."""
    first = np.array(next(iter(losses.values())))
    return {name: float(np.max(np.abs(mine - first) / np.abs(first))) for name, mine in losses.items()}


def agree(losses: dict[str, list[float]]) -> bool:
    """Return whether all modes trained the same model."""
    family = [mine for name, mine in losses.items() if name in FAMILY]
    same = all(mine == family[0] for mine in family)
    return same and all(value <= AGREE for value in difference(losses).values())
