"""What the benchmarks share: their command line, checks of flags, a stopwatch, child processes, parts of a result."""

import datetime
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, TypeVar

import torch
from torch import nn

from skirl.core.tables import Table
from skirl.tools.machine import machine
from skirl.tools.os_errors import writing

T = TypeVar("T")
sys.path.append(str(Path(__file__).resolve().parents[1]))  # for what benchmarks share with tests


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The flags that every benchmark has."""

    json: bool = False
    """Print one line of JSON."""
    record: Path | None = None
    """Write the result, with date and commit, to this JSON file too."""

    def run(self) -> dict[str, Any]:
        raise NotImplementedError


def main(bench: type[Bench], child: Callable[..., Any] = print) -> None:
    """Read flags from the command line, run the benchmark, and print its figures by name, or as JSON with --json.

    In a process that `measured` or `trainers_of` started, call `child` with what they gave it, and print what it returns.
    """
    import tyro

    if sys.argv[1:2] == ["child"]:
        print(json.dumps(child(*json.loads(sys.argv[2]))))
        return
    name, config = Path(sys.argv[0]).name, (tyro.conf.FlagCreatePairsOff,)
    try:
        flags = tyro.cli(bench, prog=f"python benchmarks/{name}", description=bench.__doc__, config=config)
        result = flags.run()
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")
    if flags.record is not None:
        with writing(flags.record):
            flags.record.parent.mkdir(parents=True, exist_ok=True)
            flags.record.write_text(
                json.dumps({"date": str(datetime.date.today()), "commit": commit()} | result) + "\n"
            )
    print(json.dumps(result, indent=None if flags.json else 1))
    if result.get("failed"):
        sys.exit(f"{name}: {result['failed']}")


def commit() -> str | None:
    """Return the commit of this checkout, with -dirty if files have changed since, or None outside of one."""
    ran = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--match="],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return ran.stdout.strip() or None


def result(bench: str, flags: Any, names: str, **figures: Any) -> dict[str, Any]:
    """Return a benchmark's result: its name, the flags in `names` (separated by spaces), the figures, the machine."""
    return {
        "bench": bench, **{name: getattr(flags, name) for name in names.split()}, **figures, "machine": machine(),
    }  # fmt: skip


class Stopwatch:
    """A stopwatch for a block, or for several, whose times add up."""

    seconds = 0.0
    """Wall clock time."""
    cpu = 0.0
    """CPU time, over all threads of this process."""

    def __enter__(self) -> Self:
        self._began, self._used = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began
        self.cpu += time.process_time() - self._used


def seconds(call: Callable[..., Any], *args: Any) -> float:
    with Stopwatch() as watch:
        call(*args)
    return watch.seconds


def in_turns(sides: Mapping[T, Callable[[], Any]], rounds: int, untimed: int = 1) -> dict[T, list[Stopwatch]]:
    """Call each side in each round, in alternating order. The first rounds, which compile, are not among the times."""
    took: dict[T, list[Stopwatch]] = {name: [] for name in sides}
    for number in range(untimed + rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            with Stopwatch() as watch:
                out = sides[name]()
            del out  # freed outside of the time
            took[name] += [watch] if number >= untimed else []
    return took


def ratio(above: Sequence[float] | None, below: Sequence[float] | None) -> Any:
    """Return the median over rounds of the ratio above / below; None if a side is missing."""
    if not above or not below:
        return None
    return round(statistics.median(a / b for a, b in zip(above, below, strict=True)), 4)


class RepeatedBatches:
    """A stream that yields the same, unchanged batches on every pass."""

    yields_fresh = True

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def started(
    words: Sequence[str], env: Mapping[str, Any] = {}, within: Sequence[str] = (), **more: Any
) -> "subprocess.Popen[str]":
    """Start another Python process, whose output comes here; `within`: the words that run it."""
    environment = os.environ | {name: str(value) for name, value in env.items()}
    words = [*within, sys.executable, *words]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True, **more)


def printed(process: "subprocess.Popen[str]") -> Any:
    said = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(f"a measuring process ended with exit code {process.returncode}; it said why above")
    return json.loads(said.splitlines()[-1])


def measured(script: str, given: Sequence[Any], env: Mapping[str, Any] = {}) -> Any:
    """Return what the child of a script returns in a process of its own."""
    return printed(started([script, "child", json.dumps(given)], env))


def trainers_of(
    count: int, script: str, given: Sequence[Any], namespaces: Sequence[str] = (), host: str = "127.0.0.1"
) -> list[Any]:
    """Run the trainers of one job, a process of this script each, and return what the child of each returns.

    With network namespaces, one each, they meet at `host`.
    """
    job = {"WORLD_SIZE": count, "MASTER_ADDR": host, "MASTER_PORT": free_port()}
    job |= {"LOCAL_WORLD_SIZE": 1, "GLOO_SOCKET_IFNAME": "wire"} if namespaces else {"LOCAL_WORLD_SIZE": count}
    ranks = []
    for rank in range(count):
        within = ["ip", "netns", "exec", namespaces[rank]] if namespaces else []
        names = job | {"RANK": rank, "LOCAL_RANK": 0 if namespaces else rank}
        ranks.append(started([script, "child", json.dumps(given)], names, within))
    return [printed(rank) for rank in ranks]


def has_fbgemm() -> bool:
    """Return whether FBGEMM is installed: `pip install --no-deps -r constraints/others.txt`."""
    return find_spec("fbgemm_gpu") is not None


class TorchTables(nn.Module):
    """All rows in one nn.EmbeddingBag per table, with sparse gradients."""

    def __init__(self, tables: Sequence[Table], weights: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.tables = tables
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(table.rows, table.dim, mode="sum", sparse=True, _weight=rows)
            for table, rows in zip(tables, weights)
        )

    def forward(self, sparse: Any) -> Any:
        offsets, features = sparse.offsets(), len(self.bags)
        ids, starts = (each.to(self.bags[0].weight.device) for each in (sparse.values(), offsets))
        batch, vectors = (len(offsets) - 1) // features, []
        for i, bag in enumerate(self.bags):
            first, last = int(offsets[i * batch]), int(offsets[(i + 1) * batch])
            vectors.append(bag(ids[first:last], starts[i * batch : (i + 1) * batch] - first))
        return SimpleNamespace(stacked=lambda: torch.stack(vectors, dim=1))

    def weights(self) -> torch.Tensor:
        return torch.cat([bag.weight.detach() for bag in self.bags])


class FbgemmTables(nn.Module):
    """All rows in FBGEMM's table-batched operator on the CPU, whose backward applies SGD or row-wise Adagrad."""

    def __init__(
        self,
        tables: Sequence[Table],
        weights: Iterable[torch.Tensor],
        *,
        lr: float,
        rowwise: bool = False,
        eps: float = 0.0,
    ) -> None:
        super().__init__()
        self.tables = tables
        optimizers = import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType
        common = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        training = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        place = (common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
        self.rows = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(table.rows, table.dim, *place) for table in tables],
            optimizer=optimizers.EXACT_ROWWISE_ADAGRAD if rowwise else optimizers.EXACT_SGD,
            learning_rate=lr,
            eps=eps,
            bounds_check_mode=common.BoundsCheckMode.NONE,
        )
        for table, rows in zip(self.rows.split_embedding_weights(), weights):
            table.copy_(rows)

    def forward(self, sparse: Any) -> Any:
        flat = self.rows(sparse.values(), sparse.offsets().long())
        return SimpleNamespace(stacked=lambda: flat.view(len(flat), len(self.tables), -1))

    def weights(self) -> torch.Tensor:
        return torch.cat(self.rows.split_embedding_weights())
