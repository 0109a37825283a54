"""`skirl place list`, `tables` and `costs`: flags and printed output. The work itself is imported when they run."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from tyro.conf import Positional

from skirl.data.flags import DataFlags
from skirl.models.flags import ModelFlags
from skirl.placement.flags import check_out, parsed_bytes, parsed_rate
from skirl.placement.tables.asked import check_asked
from skirl.placement.tables.named import OURS, PRODUCTION, Backend, Pool, flag_of
from skirl.tools.flags import Composed
from skirl.tools.progress import size
from skirl.tools.units import parse_seconds
from skirl.train.flags import OptimizerFlags, ShowFlags

MOST_RANKS = 1024
_MEASURED = ("measured",)
_SHOWN = 8
"""Most tables of a rank that are printed."""


@dataclass(frozen=True)
class ListTables(Composed):
    """List the tables of a model and what the batches of a run look up in them, for `skirl place tables`.

    >>> flags = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 64, "steps": 3}
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = ListTables.of(**flags, out=Path(folder) / "t.json", quiet=True).run()
    >>> found["batches"], found["ids"] >= found["distinct"] > 0
    (3, True)
    """

    group: ClassVar[str] = "output"
    common: ClassVar[tuple[str, ...]] = ("data", "model", "dim", "batch", "steps", "optimizer", "out")
    positional: ClassVar[str] = "data"
    instead: ClassVar[tuple[str, ...]] = ("pool",)
    """Flags with which no data is needed."""
    example: ClassVar[str] = "skirl place list synthetic:avazu --model dlrm-tiny --dim 16 --batch 1024 --steps 20"

    data: DataFlags = field(default_factory=DataFlags)
    model: ModelFlags = field(default_factory=ModelFlags)
    optimizer: OptimizerFlags = field(default_factory=OptimizerFlags)
    show: ShowFlags = field(default_factory=ShowFlags)
    pool: Literal["criteo-kaggle", "criteo-terabyte", "mlperf"] | None = None
    """List these published tables instead of the data's, each with --dim numbers a row. mlperf: those of DLRM-DCNv2, with
    several ids for each of a sample's. Lookups are random, by Zipf's law."""
    out: Path = Path("tables.json")
    """The file to write."""
    force: bool = False
    """Replace the file if it exists."""

    def __post_init__(self) -> None:
        self.data.stream().tables(self.model.row_dim)  # it checks dim
        check_out(self.out, force=self.force)
        if self.pool is not None:
            plain = DataFlags(batch=self.data.batch, seed=self.data.seed)
            said = [of.name for of in fields(DataFlags) if getattr(self.data, of.name) != getattr(plain, of.name)]
            if said:
                raise ValueError(f"pool is {self.pool}, for which no data is read: leave {' and '.join(said)} out")

    def run(self) -> dict[str, Any]:
        """Read the batches, and count what they look up."""
        import sys

        from skirl.placement.tables.from_data import listed, listed_pool

        if self.pool is not None:
            of = (self.data.batch, self.model.row_dim, self.optimizer.optimizer, self.data.seed)
            return listed_pool(self.pool, *of, self.out)
        to = sys.stderr if self.show.json else sys.stdout
        return listed(self.data, self.model, self.optimizer, self.out, quiet=self.show.quiet, to=to)

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the counts as printed lines, by name."""
        read = (
            f"{result['batches']:,} batches, each" if result["batches"] else "nothing; a batch of the published tables"
        )
        return {
            "read": f"{read} looks up {result['ids']:,.0f} ids of {result['distinct']:,.0f} rows in "
            f"{result['tables']:,} tables",
            "tables": result["out"],
            "advice": f"use skirl place tables {result['out']} --ranks 2",
        }


@dataclass(frozen=True)
class PlaceTables:
    """Place tables over the ranks of a trainer."""

    common: ClassVar[tuple[str, ...]] = ("tables", "ranks", "memory", "link", "check", "page", "out")
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "costs": ("speeds", "costs", "backend"),
        "cuts": ("columns", "no_rows", "even_rows"),
        "search": ("seconds", "seed", "from_"),
        "output": ("force", "quiet", "json"),
    }

    tables: Positional[Path]
    """The JSON file that lists the tables."""
    ranks: int = 2
    """The number of ranks."""
    memory: tuple[str, ...] | None = None
    """The most memory that the tables of each rank may take with their optimizer state, such as 16GB; one value applies
    to all ranks. No limit if not given."""
    speeds: tuple[float, ...] | None = None
    """Speed of each rank, relative to the machine that the costs are from; all alike if not given."""
    link: tuple[str, ...] = ("10Gbit",)
    """The rate at which each rank exchanges pooled rows, in each direction; one value applies to all ranks. measured: the
    rate that `skirl place costs --exchange` has measured."""
    costs: Path | None = None
    """Costs of parts of tables, as `skirl place costs` writes them; those that come with skirl if not given."""
    backend: Backend = OURS
    """The kernels that the costs are of, and that --check measures: skirl's or FBGEMM's operator, on a CPU or a GPU."""
    columns: Literal["exact", "always", "never"] = "exact"
    """Cut tables by columns. exact: except where the optimizer keeps a single number for each row, since a
    cut would then train another model."""
    no_rows: bool = False
    """Do not cut tables by rows."""
    even_rows: bool = False
    """Cut rows only evenly over all ranks, and no table both ways, as TorchRec does."""
    seconds: float = 30.0
    """The most seconds to search; the best plan so far is used."""
    check: str | None = None
    """Measure the best few plans here, one rank after the other, and improve the best one accordingly, for this long,
    such as 20s."""
    seed: int = 0
    """Seed of the random parts of the search."""
    from_: Path | None = None
    """A plan to compare with; if not given, one that deals the tables to the ranks in turn."""
    out: Path | None = Path("tables-plan.json")
    """The file to write the plan to."""
    force: bool = False
    """Replace the file if it exists."""
    page: Path | None = None
    """Write a page with plots to this .html file."""
    quiet: bool = False
    """Show no progress."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ValueError(f"ranks is {self.ranks}: set it to 1 to {MOST_RANKS}")
        for name in ("memory", "speeds", "link"):
            given = getattr(self, name)
            if given is not None and len(given) not in (1, self.ranks):
                said = " ".join(map(str, given))
                raise ValueError(f"{name} is {said}, and there are {self.ranks} ranks: name one for each")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds is {self.seconds}: set it above 0")
        for speed in self.speeds or ():
            if not 0 < speed < float("inf"):
                raise ValueError(f"speeds has {speed}: set it above 0")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}: set it to 0 or more")
        if self.even_rows and self.no_rows:
            raise ValueError("even_rows and no_rows are both set: leave one of them out")
        if self.even_rows and self.check is not None:
            raise ValueError(
                "even_rows and check are both set, and the search of check cuts rows unevenly: leave one of them out"
            )
        check_out(self.out, force=self.force)
        if self.page is not None and self.page.suffix != ".html":
            raise ValueError(f"page is {str(self.page)!r}: name a file that ends in .html")
        if self.check is not None:
            check_seconds(self.check)
        for text in self.memory or ():
            if parsed_bytes(text) < 1:
                raise ValueError(f"memory is {text!r}: set it to a size like 16GB")
        for text in self.link if self.link != _MEASURED else ():
            parsed_rate(text, "link")

    def run(self) -> dict[str, Any]:
        """Search, measure, and write the plan."""
        import sys

        from skirl.placement.tables.place import Question, placed_tables
        from skirl.placement.tables.problem import UNBOUND, Ranks

        def each(given: Any) -> list[Any]:
            return list(given) if len(given) == self.ranks else list(given) * self.ranks

        measured = self.link == _MEASURED
        rates = [1.0] * self.ranks if measured else [parsed_rate(text, "link") for text in each(self.link)]
        ranks = Ranks(
            tuple([UNBOUND] * self.ranks if self.memory is None else map(parsed_bytes, each(self.memory))),
            tuple(map(float, each(self.speeds or (1.0,)))),
            tuple(rate / rates[0] for rate in rates),
        )
        return placed_tables(
            Question(
                self.tables,
                ranks,
                self.costs,
                None if measured else rates[0],
                self.columns,
                not self.no_rows,
                self.seconds,
                self.seed,
                self.out,
                check=None if self.check is None else check_seconds(self.check),
                before=self.from_,
                page=self.page,
                quiet=self.quiet,
                to=sys.stderr if self.json else sys.stdout,
                even_rows=self.even_rows,
                backend=self.backend,
            )
        )

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the plan as printed lines, by name."""
        lines = {"tables": f"{result['tables']:,}, {result['cut']:,} of them cut"}
        checked = result["check"]
        for rank in result["ranks"]:
            names = rank["tables"]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            memory = "" if rank["memory"] is None else f" of {size(rank['memory'])}"
            measured = "" if checked is None else f" (measured {rank['measured_ms']:.3f})"
            lines[f"rank {rank['rank']}"] = (
                f"{size(rank['bytes'])}{memory}; a step computes {rank['compute_ms']:.3f} ms{measured}, exchanges pooled "
                f"rows {rank['forward_ms']:.3f} ms and gradients {rank['backward_ms']:.3f} ms\n"
                f"{', '.join(names[:_SHOWN])}{more}"
            )
        lines["busiest"] = _busiest(result, result, "compute_ms", "predicted")
        if checked is not None:
            lines["measured"] = _busiest(result, checked, "measured_ms", "measured")
            lines["check"] = (
                f"{len(checked['plans'])} plans in {checked['seconds']:.1f} s, the best is {checked['name']!r}; measuring "
                f"again differs by {checked['noise']:.1%}"
            )
        if result["costs_from"] is not None:
            lines["costs"] = f"measured on {result['costs_from']}, not on this machine"
        lines["before"] = _before(result)
        lines["exchange"] = f"bytes over --link {' '.join(self.link)}, not measured"
        if (wire := result["exchange"]) is not None:
            lines["exchange"] = (
                f"{wire['kind']}: {size(wire['bytes_a_second'])}/s, measured among {wire['ranks']} processes over gloo"
            )
        took = f"{result['seconds']:.1f} s, {result['states']:,} ways to cut"
        lines["search"] = took if result["in_time"] else f"{took}; stopped by --seconds"
        if result["out"] is not None:
            lines["plan"] = result["out"]
        if result["page"] is not None:
            lines["page"] = result["page"]
        lines["advice"] = result["sentence"]
        return lines


def check_seconds(text: str) -> float:
    """Parse the seconds of --check.

    **Arguments**

    - `text`: the text as given.
    """
    try:
        return parse_seconds(text)
    except ValueError:
        raise ValueError(f"check is {text!r}: write it like 20s or 1m") from None


def _busiest(result: dict[str, Any], told: dict[str, Any], computes: str, how: str) -> str:
    """Say what decides the maximum, and how far it is from perfect balance."""
    rank = result["ranks"][told["busiest"]]
    parts = {"computing": rank[computes], "exchanging": rank["forward_ms"] + rank["backward_ms"]}
    most = max(parts, key=lambda name: parts[name])
    return (
        f"rank {told['busiest']}, {told['busiest_ms']:.3f} ms {how}, {told['balance'] - 1:.1%} above perfect balance; "
        f"{parts[most] / max(sum(parts.values()), 1e-12):.0%} of it is {most}"
    )


def _before(result: dict[str, Any]) -> str:
    before, checked = result["before"], result["check"]
    over = f", exceeds the memory of a rank by {size(before['bytes_over'])}" if before["bytes_over"] else ""
    text = f"{before['name']}: {before['busiest_ms']:.3f} ms predicted"
    text += "" if before["measured_ms"] is None else f", {before['measured_ms']:.3f} measured"
    if before["measured_ms"] is not None and checked is not None:
        ratio = checked["busiest_ms"] / before["measured_ms"]
    else:
        ratio = result["busiest_ms"] / before["busiest_ms"]
    moves = "" if before["name"] == "round robin" else f"; from there {size(before['moves'])} of rows move"
    but = f", but {before['forbidden']}" if before["forbidden"] else ""
    return f"{text}{over}{but}; this plan takes {ratio:.3f} times as long{moves}"


@dataclass(frozen=True)
class MeasureCosts:
    """Measure what parts of tables cost on this machine, for `skirl place tables --costs`."""

    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "measurement": ("optimizers", "pool", "combinations", "seed"),
        "output": ("force", "quiet", "json"),
    }

    common: ClassVar[tuple[str, ...]] = ("backend", "minutes", "optimizers", "tables", "start", "exchange", "out")

    backend: Backend = OURS
    """The kernels to measure: skirl's or FBGEMM's operator, on a CPU or a GPU."""

    minutes: float = 1.0
    """Minutes to measure once everything is prepared; two rounds are always measured."""
    optimizers: tuple[str, ...] = ("rowwise-adagrad",)
    """Row optimizers to measure, each by itself."""
    tables: Path | None = None
    """Measure the tables of this list, as `skirl place list` writes it: at least four, of which every fourth one judges
    the costs. If not given, those of --pool."""
    pool: Pool = PRODUCTION
    """The tables to measure. production: generated, with the moments of published production tables, and for each fourth
    combination Criteo's; or published ones, of which every fourth one judges the costs. mlperf: those of DLRM-DCNv2."""
    combinations: int = 150
    """Combinations of tables to learn from, for each optimizer."""
    start: Path | None = None
    """Costs of another machine, whose net is adapted. If not given, those that come with skirl, for its CPU kernels;
    other backends start from nothing."""
    exchange: int = 0
    """The number of processes on this machine that are timed while they exchange pooled rows over gloo; 0: none."""
    seed: int = 0
    """Seed of the random combinations."""
    out: Path = Path("costs.json")
    """The file to write. Measurements are kept next to it until then, and a killed run resumes from them."""
    force: bool = False
    """Replace the file if it exists."""
    quiet: bool = False
    """Show no progress."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        from skirl.core.optim import ROW_OPTIMIZERS

        check_asked(self.minutes, self.combinations, self.seed, self.out)
        check_out(self.out, force=self.force)
        for name in self.optimizers:
            if name not in ROW_OPTIMIZERS:
                raise ValueError(f"optimizers has {name!r}: set it to some of {', '.join(ROW_OPTIMIZERS)}")
        if self.exchange == 1 or not 0 <= self.exchange <= 64:
            raise ValueError(f"exchange is {self.exchange}: set it to 2 to 64, or to 0")
        if len(set(self.optimizers)) < len(self.optimizers) or not self.optimizers:
            raise ValueError(f"optimizers is {' '.join(self.optimizers)}: name at least one, each once")
        if self.tables is not None and self.pool != PRODUCTION:
            raise ValueError(f"tables and pool are both set, to {self.tables} and {self.pool}: leave one of them out")

    def run(self) -> dict[str, Any]:
        """Measure, fit and write."""
        import sys

        from skirl.placement.tables.backends import check_there
        from skirl.placement.tables.calibrate import BATCHES, DIMS, machine_costs
        from skirl.placement.tables.costs import costs_for
        from skirl.placement.tables.published import published
        from skirl.placement.tables.spec import read_specs

        to = sys.stderr if self.json else sys.stdout
        start = None
        if self.start is not None or self.backend == OURS:
            start = costs_for(self.backend, self.start, link=1.0, ranks=1)
        tables = () if self.tables is None else read_specs(self.tables)
        check_there(self.backend)
        if self.pool != PRODUCTION:
            tables = [m.spec for m in published(self.pool, batch=max(BATCHES), dims=DIMS, seed=self.seed)]
        return machine_costs(
            self.optimizers, self.minutes, self.combinations, self.seed, self.out, backend=self.backend, start=start,
            exchange=self.exchange, tables=tables, quiet=self.quiet, to=to,
        )[1]  # fmt: skip

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as printed lines, by name."""
        lines = {
            "measured": f"{result['backend']}, {result['combinations']} combinations of tables, {result['rounds']} rounds; "
            f"measuring again differs by {result['noise']:.1%}; {result['disturbed']} times another load disturbed a round",
            "chosen": f"{result['chosen']}: {result['why']}",
        }
        if (wire := result["exchange"]) is not None:
            lines["exchange"] = (
                f"{wire['kind']}: {size(wire['bytes_a_second'])}/s among {wire['ranks']} processes, error "
                f"{wire['error']:.0%}; repeats vary by {wire['noise']:.0%}"
            )
        also = f"use --costs {result['out']}{flag_of(result['backend'])}"
        return lines | {"costs": result["out"], "advice": also}
