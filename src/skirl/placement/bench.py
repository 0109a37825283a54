"""`skirl bench place`: compare counted moves with executed ones, and placements with each other over emulated links."""

import json
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import thread_time
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from skirl.core.keys import key_of
from skirl.measure.bench.helpers import at_least_one, result
from skirl.placement.tables.named import OURS, PRODUCTION, Backend, Pool

if TYPE_CHECKING:
    from skirl.core.placement import Cut
    from skirl.core.placement_plan import PlacementPlan
    from skirl.placement.bench_runs import Outcome, RowsJob
    from skirl.placement.loads import Loads


@dataclass(frozen=True)
class PlaceBench:
    """Flags of `skirl bench place`."""

    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "runs": ("sites", "batch", "steps", "rows_scale", "share", "link_ms"),
        "output": ("json",),
    }

    part: Literal[
        "loads", "stores", "exchange", "optimum", "tight", "time", "model", "plans", "transfer", "torchrec"
    ] = "loads"
    """loads: predicted rows and bytes by site and step against those of an executed run; stores: iterations over
    emulated links; exchange: bytes between trainers, as rows and as pooled vectors. For tables over ranks, optimum: the
    search against every placement of small tasks; tight: tables that fill 90 to 98% of the memory; time: seconds that
    searches take; model: both kinds of costs, on tables they were not fitted to; plans: measured plans against simpler
    ones; transfer: plans after a minute of calibration against full training; torchrec: plans that TorchRec runs in two
    processes, against plain torch and its own planner's."""
    sites: tuple[int, ...] = (1, 2, 3, 4, 8)
    """Numbers of sites. Part stores takes 4, 8 or both; anything else means both."""
    batch: int = 512
    """Samples in a step."""
    steps: int = 40
    """Steps of each run."""
    rows_scale: float = 0.01
    """Scale factor for the rows of the tables, which are modelled on Criteo Kaggle."""
    share: float = 0.1
    """Cache size as a share of the touched rows; at least what one batch needs."""
    link_ms: float = 250.0
    """For part stores: the least milliseconds that the links take for a step; all else in a step should be short
    compared with it."""
    tasks: int | None = None
    """Number of tasks, for tables over ranks; for part model, of held-out combinations of tables. By default the number
    behind the documented figures."""
    backend: Backend = OURS
    """For parts model and plans: the kernels to measure. Where there is a GPU, those on it are measured too."""
    pool: Pool = PRODUCTION
    """For parts model and plans: the tables, which costs are not fitted to."""
    seed: int = 0
    """Seed of the data."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        at_least_one(self, "batch", "steps")
        if self.tasks is not None:
            at_least_one(self, "tasks")
        if not self.sites or min(self.sites) < 1:
            raise ValueError(f"sites is {self.sites}: set it to numbers of 1 or more")
        if not 0 < self.link_ms < float("inf"):
            raise ValueError(f"link_ms is {self.link_ms}: set it to milliseconds above 0")
        if self.steps < 12:
            raise ValueError(f"steps is {self.steps}: set it to 12 or more, since one run is killed in its tenth")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}: set it above 0 and up to 1")
        if self.part not in ("model", "plans") and (self.backend, self.pool) != (OURS, PRODUCTION):
            raise ValueError(f"backend and pool are for parts model and plans, and part is {self.part}: leave them out")

    def run(self) -> dict[str, Any]:
        """Measure one part."""
        from skirl.placement import bench_exchange, bench_stores
        from skirl.placement.tables import bench_tables

        # Every part has noise: how much repeats of what it times differ, and 0 if it times nothing.
        if self.part in bench_tables.PARTS:
            found = bench_tables.measured(self.part, self.tasks, self.seed, self.backend, self.pool)
            return result("place", self, "part backend pool seed", **found)
        if self.part == "exchange":
            return result("place", self, "part seed", **bench_exchange.measured(self.seed))
        if self.part == "stores":
            links = self.sites if set(self.sites) <= {4, 8} else (4, 8)
            found = bench_stores.measured(*self.job("criteo-kaggle", ranked=True), links, self.link_ms / 1e3)
        else:
            found = self._loads()
        return result("place", self, "part sites batch steps rows_scale share link_ms seed", **found)

    def _loads(self) -> dict[str, Any]:
        from skirl.placement.bench_runs import counted, plan_of, trained

        differ, compared, bits, moved = 0, 0, [], 0
        for kind in ("criteo-kaggle", "mixed"):
            job, batches = self.job(kind)
            whole = trained(job, job.embeddings("memory"), batches)
            with counted(job, batches) as loads:
                for sites in self.sites:
                    plan = plan_of(job, sites, cuts_of(len(job.tables()), sites))
                    outcome, wrong, all_of = executed(job, batches, plan, loads)
                    differ, compared = differ + wrong, compared + all_of
                    bits.append(same(outcome, whole))
                moved += sum(len(keys) for step in loads.steps() for keys in (*step.read, *step.written))
            bits.append(killed(job, batches, whole, plan_of(job, 3, cuts_of(len(job.tables()), 3))))
        ns, noise = site_ns_key()
        return {
            "loads_differ": differ,
            "loads_compared": compared,
            "rows_moved": moved,
            "bits_equal": all(bits),
            "site_ns_key": ns,
            "noise": noise,
        }

    def job(self, kind: str, *, ranked: bool = False) -> "tuple[RowsJob, Sequence[Any]]":
        """Return a job whose cache holds `share` of its touched rows, and its batches."""
        from skirl.placement.bench_runs import RowsJob, columns

        job = RowsJob(kind, self.batch, self.steps, self.rows_scale, 0, seed=self.seed, ranked=ranked)
        batches = job.batches()
        ids = [columns(batch) for batch in batches]
        touched = sum(len(np.unique(column)) for column in np.concatenate(ids).T)
        least = max(sum(len(np.unique(column)) for column in of.T) for of in ids)
        cache = max(int(self.share * touched), least + least // 5 + 8)
        return replace(job, cache=cache), batches

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as printed lines, by name."""
        noise = f"repeats differ by {result['noise']:.1%}" if result["noise"] else "none, since nothing is timed"
        return {"noise": noise} | self._told(result) | {"seed": str(result["seed"])}

    def _told(self, result: dict[str, Any]) -> dict[str, str]:
        from skirl.placement import bench_exchange, bench_stores
        from skirl.placement.tables import bench_tables

        if self.part in bench_tables.PARTS:
            return bench_tables.told(result)
        if self.part in ("stores", "exchange"):
            return {"stores": bench_stores, "exchange": bench_exchange}[self.part].told(result)
        return {
            "loads": f"{result['loads_differ']:,} of {result['loads_compared']:,} rows and bytes by site and step differ",
            "bits": "equal, also after kill -9 and a resume" if result["bits_equal"] else "DIFFERENT",
            "site_of": f"{result['site_ns_key']:.1f} ns a key",
        }


def cuts_of(tables: int, sites: int) -> "list[Cut]":
    """Return one cut for each table: even, weighted, by rows and whole, in turn.

    **Arguments**

    - `tables`, `sites`: how many there are.
    """
    from skirl.core.placement import Cut

    ways = [
        Cut.even(range(sites)),
        Cut.weighted(range(1, sites + 1)),
        Cut(tuple(7 * n for n in range(sites)), tuple(range(sites)), "rows"),
    ]
    return [Cut((0,), (n % sites,)) if n % 4 == 3 else ways[n % 4] for n in range(tables)]


def executed(
    job: "RowsJob", batches: Sequence[Any], plan: "PlacementPlan", loads: "Loads"
) -> "tuple[Outcome, int, int]":
    """Train over sites that record their calls.

    Return the outcome, how many of the predicted loads differ, and how many were compared.

    **Arguments**

    - `job`, `batches`: what to train.
    - `plan`: where rows live.
    - `loads`: the planned moves.
    """
    from skirl.placement.bench_runs import RecordingSite, layout_of, load_of, trained
    from skirl.store.placed.store import PlacedStore

    layout = layout_of(job)
    sites = [RecordingSite(layout) for _ in plan.sites]
    store = PlacedStore(plan, sites, layout)
    calls: list[Any] = []
    outcome = trained(
        job,
        job.embeddings(store),
        batches,
        before_flush=lambda: calls.extend((list(site.reads), list(site.writes)) for site in sites),
    )
    store.close()
    wanted: list[tuple[list[Any], list[Any]]] = [([], []) for _ in sites]
    for moves in loads.steps():
        for kind, parts in enumerate((moves.read, moves.written)):
            for nbytes, keys in zip(loads.record_bytes, parts, strict=True):
                of = plan.placement.site_of(keys)
                for site in np.unique(of).tolist():
                    wanted[site][kind].append(load_of(keys[of == site], nbytes))
    differ = compared = 0
    for mine, theirs in zip(calls, wanted, strict=True):
        for found, planned in zip(mine, theirs, strict=True):
            differ += max((Counter(found) - Counter(planned)).total(), (Counter(planned) - Counter(found)).total())
            compared += len(planned)
    return outcome, differ, compared


def same(one: "Outcome", other: "Outcome") -> bool:
    """Return whether all rows are equal bit for bit, and the losses of the steps that both runs did.

    **Arguments**

    - `one`, `other`: outcomes of two runs; one may have begun later.
    """
    both = min(len(one.losses), len(other.losses))
    return one.losses[-both:] == other.losses[-both:] and one.rows == other.rows


def killed(job: "RowsJob", batches: Sequence[Any], whole: "Outcome", plan: "PlacementPlan") -> bool:
    """Return whether a run killed over disks resumes to the bits of an unkilled one, under its own plan and another.

    **Arguments**

    - `job`, `batches`: what to train.
    - `whole`: the outcome of the same job over one store.
    - `plan`: the plan of the run that is killed.
    """
    from skirl.core.placement import Cut
    from skirl.core.placement_plan import PlacementPlan, Site
    from skirl.placement.bench_runs import plan_of, trained

    with tempfile.TemporaryDirectory(prefix="skirl-place-") as folder:
        root = Path(folder)
        even = [Cut.even(range(2))] * len(plan.tables)
        for name, of in (("one", plan), ("two", plan_of(job, 2, even))):
            sites = tuple(Site(f"site-{n}", f"disk:{root}/{name}-{n}") for n in range(len(of.sites)))
            PlacementPlan(sites, of.tables).save(root / f"{name}.json")
        said = {"job": asdict(job), "store": f"placed:{root}/one.json", "folder": str(root / "saved"), "kill_at": 10}
        ran = subprocess.run([sys.executable, "-m", "skirl.placement.bench_runs", json.dumps(said)], check=False)
        if ran.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the run that was to be killed ended with {ran.returncode}; its error is above")
        equal = []
        for name in ("one", "two"):
            embeddings = job.embeddings(f"placed:{root}/{name}.json", resume=True)
            copy = root / f"saved-{name}"
            subprocess.run(["cp", "-r", str(root / "saved"), str(copy)], check=True)
            equal.append(same(trained(job, embeddings, batches, folder=copy), whole))
            embeddings.close()
    return all(equal)


def site_ns_key(keys: int = 1 << 20, rounds: int = 15) -> tuple[float, float]:
    """Return the least nanoseconds of all rounds to look up a key's site, with 26 tables cut by weights over 8 sites.

    The second number is the relative difference between the least of every other round and that of the rest.

    **Arguments**

    - `keys`: keys per round.
    - `rounds`: number of rounds, 2 or more.
    """
    from skirl.core.placement import Cut, Placement

    rng = np.random.default_rng(0)
    some = key_of(rng.integers(0, 26, keys), rng.integers(0, 1 << 22, keys))
    cuts = {table: Cut.weighted(rng.random(8).tolist()) for table in range(26)}
    placement, took = Placement(8, Cut.even(range(8)), cuts, "sites"), list[float]()
    for _ in range(rounds + 1):
        began = thread_time()
        placement.site_of(some)
        took.append(thread_time() - began)
    one, other = min(took[1::2]), min(took[2::2])  # the first one compiles
    return min(one, other) / keys * 1e9, abs(one - other) / min(one, other)
