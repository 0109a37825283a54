"""What the benchmarks share: their command line, checks of flags, a stopwatch, child processes, parts of a result."""

import datetime
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import make_dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Self

import torch
from torch import nn

from skirl.core.tables import Table
from skirl.tools.machine import machine
from skirl.tools.os_errors import writing

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for what benchmarks share with tests


def main(command: type) -> None:
    """Read a dataclass of flags from the command line, run it, and print the figures by name, or as JSON with --json."""
    import tyro

    name = Path(sys.argv[0]).name
    record = Annotated[
        Path | None, tyro.conf.arg(help="Write the result, with date and commit, to this JSON file too.")
    ]
    frozen = command.__dataclass_params__.frozen  # type: ignore[attr-defined]
    json_flag = Annotated[bool, tyro.conf.arg(help="Print one line of JSON.")]
    more = [("json", json_flag, False), ("record", record, None)]
    flags = make_dataclass(command.__name__, more, bases=(command,), kw_only=True, frozen=frozen)
    flags.__module__ = command.__module__
    try:
        run: Any = tyro.cli(
            flags, prog=f"python benchmarks/{name}", description=command.__doc__, config=(tyro.conf.FlagCreatePairsOff,)
        )
        result = run.run()
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")
    if run.record is not None:
        with writing(run.record):
            run.record.parent.mkdir(parents=True, exist_ok=True)
            run.record.write_text(json.dumps({"date": str(datetime.date.today()), "commit": commit()} | result) + "\n")
    print(json.dumps(result, indent=None if run.json else 1))
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
    """A stopwatch for a block."""

    seconds: float
    """Wall clock time."""
    cpu: float
    """CPU time, over all threads of this process."""

    def __enter__(self) -> Self:
        self._began, self._used = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds, self.cpu = time.perf_counter() - self._began, time.process_time() - self._used


def seconds(call: Callable[..., Any], *args: Any) -> float:
    """Return the wall clock time of a call."""
    with Stopwatch() as watch:
        call(*args)
    return watch.seconds


def processes(
    count: int, arguments: Sequence[str], namespaces: Sequence[str] = (), host: str = "127.0.0.1"
) -> list[Any]:
    """Run the trainers of one job, a Python process each, and return the last line that each prints, parsed as JSON.

    With network namespaces, one each, they meet at `host`.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job: dict[str, Any] = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": host, "MASTER_PORT": port}
    if namespaces:
        job |= {"LOCAL_WORLD_SIZE": 1, "GLOO_SOCKET_IFNAME": "wire"}
    ranks = []
    for rank in range(count):
        within = ["ip", "netns", "exec", namespaces[rank]] if namespaces else []
        names = job | {"RANK": rank, "LOCAL_RANK": 0 if namespaces else rank}
        env = os.environ | {name: str(value) for name, value in names.items()}
        ranks.append(
            subprocess.Popen([*within, sys.executable, *arguments], env=env, stdout=subprocess.PIPE, text=True)
        )
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"one of {count} measuring processes failed; it said why above")
    return [json.loads(lines.splitlines()[-1]) for lines in said]


def child(arguments: Sequence[str], env: Mapping[str, str] = {}) -> Any:
    """Run another Python process and return the last line that it prints, parsed as JSON."""
    ran = subprocess.run([sys.executable, *arguments], env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        raise RuntimeError(f"the measuring process ended with exit code {ran.returncode}; it said why above")
    return json.loads(ran.stdout.splitlines()[-1])


def has_fbgemm() -> bool:
    """Return whether FBGEMM is installed: `pip install --no-deps -r constraints/others.txt`."""
    return find_spec("fbgemm_gpu") is not None


def fbgemm(tables: Sequence[Table], *, lr: float, rowwise: bool = False, eps: float = 0.0) -> Any:
    """Return FBGEMM's operator on the CPU with all tables, whose backward applies SGD or row-wise Adagrad."""
    optimizers = import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType
    common = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    training = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    place = (common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
    return training.SplitTableBatchedEmbeddingBagsCodegen(
        [(table.rows, table.dim, *place) for table in tables],
        optimizer=optimizers.EXACT_ROWWISE_ADAGRAD if rowwise else optimizers.EXACT_SGD,
        learning_rate=lr,
        eps=eps,
        bounds_check_mode=common.BoundsCheckMode.NONE,
    )


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
        """Return the rows of all tables."""
        return torch.cat([bag.weight.detach() for bag in self.bags])


class FbgemmTables(nn.Module):
    """All rows in FBGEMM's table-batched operator, whose backward applies the row optimizer."""

    def __init__(self, tables: Sequence[Table], weights: Iterable[torch.Tensor], **optimizer: Any) -> None:
        super().__init__()
        self.tables = tables
        self.rows = fbgemm(tables, **optimizer)
        for table, rows in zip(self.rows.split_embedding_weights(), weights):
            table.copy_(rows)

    def forward(self, sparse: Any) -> Any:
        flat = self.rows(sparse.values(), sparse.offsets())
        return SimpleNamespace(stacked=lambda: flat.view(len(flat), len(self.tables), -1))

    def weights(self) -> torch.Tensor:
        """Return the rows of all tables."""
        return torch.cat(self.rows.split_embedding_weights())
