"""`skirl size` and `skirl place`: their flags and what they print. The work itself is imported when they run."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from skirl.cli.show import ShowFlags, columns, facts, text
from skirl.data.flags import DataFlags
from skirl.models.flags import ModelFlags
from skirl.tools.flags import Composed, check_out, flags_of, parsed
from skirl.tools.progress import progress_of
from skirl.tools.units import Link, parse_bytes, size
from skirl.train.flags import MovementFlags, OptimizerFlags

MOST_RANKS = 1024
_OF_TABLES = ("data", "model", "dim", "batch", "steps")
"""Flags that a list of tables stands for."""


@dataclass(frozen=True)
class Size(Composed):
    group: ClassVar[str] = "output"
    example: ClassVar[str] = "skirl size synthetic:avazu --model dlrm-tiny --dim 16 --batch 1024 --steps 50"
    """A command line to begin with, shown if no data is given."""

    data: DataFlags = field(default_factory=DataFlags)
    model: ModelFlags = field(default_factory=ModelFlags)
    optimizer: OptimizerFlags = field(default_factory=OptimizerFlags)
    movement: MovementFlags = field(default_factory=MovementFlags)
    show: ShowFlags = field(default_factory=ShowFlags)
    link: str | None = None
    """Rate and delay of the way between cache and store, such as 1Gbit/s,100us."""
    step_ms: float | None = None
    """Milliseconds that a step computes; with --link, the advice is the smallest cache with which the link keeps up."""

    def __post_init__(self) -> None:
        self.data.stream().tables(self.model.row_dim)  # checks dim
        if self.link is not None:
            Link.parse(self.link)
        if self.step_ms is not None and self.link is None:
            raise ValueError(
                f"step_ms is {self.step_ms}, and link is not given, so nothing is known to hide: set link too"
            )
        if self.step_ms is not None and not 0 < self.step_ms < float("inf"):
            raise ValueError(f"step_ms is {self.step_ms}: set it to milliseconds above 0")

    def run(self) -> dict[str, Any]:
        from skirl.core.optim import row_optimizer
        from skirl.sizing.size import sized

        stream, rule = self.data.stream(), row_optimizer(self.optimizer.optimizer)()
        tables, batches = stream.tables(self.model.row_dim), (batch.sparse for batch in stream)
        return sized(batches, tables, rule, self.movement.prefetch, self.link, self.step_ms, self.data.steps)

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        from skirl.cli.size import lines_of

        return lines_of(result)


@dataclass(frozen=True)
class Place(Composed):
    group: ClassVar[str] = "plan"
    defaults: ClassVar[Mapping[str, Any]] = {"steps": 20}

    data: DataFlags = field(default_factory=DataFlags)
    model: ModelFlags = field(default_factory=ModelFlags)
    optimizer: OptimizerFlags = field(default_factory=OptimizerFlags)
    show: ShowFlags = field(default_factory=ShowFlags)
    tables: Path | None = None
    """A JSON file that lists the tables; if not given, they are those of --model, counted in batches of DATA."""
    ranks: int = 2
    """The number of TorchRec's ranks."""
    trainers: int | None = None
    """In place of --ranks: plan for this many trainers of skirl, as `skirl train --placement` takes it. Each table is whole
    at one of them, cut by columns, or its rows are spread over all."""
    memory: tuple[str, ...] | None = None
    """The most memory that tables of a rank may take with their state, such as 16GB: one value, or one for each rank."""
    link: str = "10Gbit/s"
    """The rate at which each rank exchanges pooled rows, in each direction, such as 10Gbit/s or 1.25GB/s; not measured."""
    kernel: Literal["skirl-cpu", "fbgemm-cpu", "fbgemm-cuda"] = "skirl-cpu"
    """The kernels that will run the plan and are measured: skirl's or FBGEMM's, which TorchRec runs; cuda is unproven."""
    seconds: float = 30.0
    """The most seconds to search; the best plan so far is used."""
    costs: Path | None = None
    """The file that keeps costs of parts of tables; if there is none, they are measured, and it is written. If not given,
    costs-KERNEL.json."""
    minutes: float = 0.5
    """Minutes to measure costs once everything is prepared."""
    no_measure: bool = False
    """Measure nothing here: take --costs, or costs that come with skirl, and the plan that is predicted to be best."""
    out: Path = Path("plan.json")
    """The file to write the plan to."""
    force: bool = False
    """Replace the file if it exists."""

    def __post_init__(self) -> None:
        what = "ranks" if self.trainers is None else "trainers"
        if not 1 <= self.count <= MOST_RANKS:
            raise ValueError(f"{what} is {self.count}: set it to 1 to {MOST_RANKS}")
        wrong = [name for name in ("kernel", "ranks") if getattr(self, name) != getattr(Place, name)]
        if self.trainers is not None and wrong:
            raise ValueError(
                f"trainers run skirl's kernels and train the same model, so {wrong[0]} is {getattr(self, wrong[0])!r} for "
                f"TorchRec alone: leave {wrong[0]} out"
            )
        if self.memory is not None and len(self.memory) not in (1, self.count):
            raise ValueError(f"memory is {','.join(self.memory)}, and there are {self.count} {what}: name one for each")
        for name in ("seconds", "minutes"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}: set it above 0")
        if self.costs is not None and self.costs.suffix != ".json":
            raise ValueError(f"costs is {str(self.costs)!r}: name a file that ends in .json")
        if self.tables is not None:
            usual, own = flags_of(type(self)), self.flat()
            given = [name for name in _OF_TABLES if own[name] != usual[name].default]
            if given:
                raise ValueError(
                    f"tables and {given[0]} ({own[given[0]]}) both say what is placed: leave one of them out"
                )
        check_out(self.out, self.force, ".json")
        self.caps()
        self.rate()

    @property
    def count(self) -> int:
        return self.ranks if self.trainers is None else self.trainers

    def caps(self) -> tuple[int, ...]:
        from skirl.placement.search import UNBOUND

        caps = [parsed("memory", one, parse_bytes, "a size like 16GB") for one in self.memory or ()] or [UNBOUND]
        if min(caps) <= 0:
            raise ValueError(f"memory is {','.join(self.memory or ())}: set each to a size like 16GB")
        return tuple(caps if len(caps) == self.count else caps * self.count)

    def rate(self) -> float:
        with suppress(ValueError):
            if not (link := Link.parse(self.link)).delay:
                return link.rate
        raise ValueError(
            f"link is {self.link!r}: set it to a rate in bits or bytes a second, such as 10Gbit/s or 1.25GB/s, without a "
            "delay"
        )

    def run(self) -> dict[str, Any]:
        from skirl.placement.measure import arena_of, check_plans, check_specs, costs_for, count_tables, exchange_of
        from skirl.placement.search import UNBOUND, plan_tables, ways_ms
        from skirl.placement.spec import pieces_of, plan_of, read_specs
        from skirl.train.placed import count
        from skirl.train.recipe import Recipe

        if self.tables is not None:
            specs = read_specs(self.tables, self.optimizer.optimizer)
        else:
            specs = count_tables(Recipe(data=self.data, model=self.model, optimizer=self.optimizer))
        check_specs(self.kernel, specs, self.no_measure)  # before the search, which may take long
        path = self.costs or (None if self.no_measure else Path(f"costs-{self.kernel}.json"))
        costs = costs_for(
            self.kernel, {spec.optimizer for spec in specs}, path, link=self.rate(), ranks=self.count,
            minutes=None if self.no_measure else self.minutes,
        )  # fmt: skip
        sent = None
        if self.trainers is not None:
            sent = {spec.name: spec.sent(self.trainers) for spec in specs}
            if self.tables is None:  # as the data has them, not as if each trainer had any samples
                stream, tables = self.data.stream(), self.data.stream().tables(self.model.row_dim)
                counted = count((batch.sparse for batch in stream), tables, self.trainers)
                sent = {name: of for name, (of, _) in counted.items()}
            costs = replace(costs, sent=sent)
        plan, found, problem = plan_tables(specs, self.caps(), costs, seconds=self.seconds)
        placed, computing, busiest = found.placed, None, list[float]()
        if not self.no_measure:
            with progress_of("measure plans"):
                placed, computing, busiest = check_plans(problem, found, arena_of(self.kernel), self.data.seed)
            plan = plan_of(specs, placed)
        plan.save(self.out)
        found_at = {table.name: table for table in plan.tables}
        ways = sent and {
            spec.name: {
                "trainer": found_at[spec.name].at, **sent[spec.name]._asdict(),
                **ways_ms(problem, n, [piece for piece, _ in pieces_of(n, found_at[spec.name], self.count) if piece.rows]),
            }
            for n, spec in enumerate(problem.specs)
        }  # fmt: skip
        exchange = exchange_of(problem, placed)
        ranks = [
            {
                "rank": rank, "bytes": int(placed.used[rank]), "memory": None if cap >= UNBOUND else cap,
                "compute_ms": float(placed.load[rank] - exchange[rank]), "exchange_ms": float(exchange[rank]),
                "measured_ms": None if computing is None else float(computing[rank]),
                "tables": plan.at(rank),
            }
            for rank, cap in enumerate(problem.caps)
        ]  # fmt: skip
        load = placed.load if computing is None else computing + exchange
        return {
            "tables": len(specs), "cut": sum(not isinstance(table.at, int) for table in plan.tables), "ranks": ranks,
            "busiest": int(load.argmax()), "busiest_ms": float(load.max()), "predicted_ms": float(placed.load.max()),
            "balance": float(load.max() / load.mean()),
            "seconds": found.seconds, "measured": busiest, "ways": ways, "out": str(self.out),
        }  # fmt: skip

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        lines, measured = facts(result, "tables", *["cut"] * (self.trainers is None)), result["measured"]
        one = "rank" if self.trainers is None else "trainer"
        if result["ways"] is not None:
            cells = [("table", "way", "by rows", "each", "whole", "its trainer")]
            for name, of in result["ways"].items():
                way = "by rows" if of["trainer"] is None else f"whole at {of['trainer']}"
                if isinstance(of["trainer"], dict):
                    cut = ", ".join(f"{count} at {site}" for site, count in of["trainer"].items())
                    way = f"columns: {cut}, {of['planned_ms']:.3f} ms each at most"
                ms = (f"{of[name]:.3f} ms" for name in ("rows_ms", "whole_ms"))
                cells.append((name, way, size(of["rows"]), next(ms), size(of["whole"]), next(ms)))
            lines["ways"] = columns(cells, left=(0, 1)) + "\nbytes and times of a step; the busiest trainer counts"
        words = {"compute_ms": "to compute", "measured_ms": "measured", "exchange_ms": "to exchange"}
        for rank in result["ranks"]:
            costs = ", ".join(f"{rank[name]:.3f} ms {word}" for name, word in words.items() if rank[name] is not None)
            most = "" if rank["memory"] is None else f" of {size(rank['memory'])}"
            lines[f"{one} {rank['rank']}"] = f"{size(rank['bytes'])}{most}, {costs}\n{text(rank['tables'])}"
        how = "computing measured, exchange predicted" if measured else "predicted"
        lines["busiest"] = (
            f"{one} {result['busiest']}, {result['busiest_ms']:.3f} ms ({how}), "
            f"{result['balance'] - 1:.1%} above perfect balance"
        )
        if measured:
            times = ", ".join(f"{ms:.3f}" for ms in measured)
            lines["check"] = f"the best plans take {times} ms; the fastest is used"
        lines["kernel"] = self.kernel + f", with costs {self.costs or 'as shipped'}" * self.no_measure
        takes = f"skirl.torchrec.plan({result['out']!r}, model)"
        takes = f"skirl launch -n {self.trainers} -- train --placement {self.out}" if self.trainers else takes
        return lines | {"out": f"{self.out}; {takes} takes it"}
