"""The command `skirl`: finds the subcommand, lets tyro read its flags, runs it, and says how it ended.

A subcommand is a dataclass of its flags, in the module that owns the work: `run()` does it and returns the result, which
says under `failed` why if it failed, and `summary(result)` writes it for people. Only the one that is asked for is imported:
one that lacks what it needs cannot break the others, as it would in a tyro union of all. `skirl --help` takes 1.6 s, of
which torch takes 1.4: the public names of skirl import it.
"""

import difflib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from skirl.tools.progress import listed

COMMANDS = {
    "train": ("skirl.train.train:Train", "train a model whose tables are larger than the cache"),
    "verify": (
        "skirl.train.verify:Verify",
        "train with a cache, with every row resident and in plain Python; compare all bits",
    ),
    "size": (
        "skirl.measure.sizing.size:Size",
        "how much cache a run needs: traffic against cache size, and what to choose",
    ),
    "report": (
        "skirl.train.report.report:Report",
        "what a run did: losses, AUC, throughput, movement, stalls; a page with plots",
    ),
    "vocab": ("skirl.data.vocab:Vocab", "give the ids of data files rows of their own, in one pass and bounded memory"),
    "convert": ("skirl.data.convert:Convert", "write data files as Parquet that is read several times faster"),
    "export": (
        "skirl.checkpoint.commands:Export",
        "rows of a checkpoint as safetensors, a state dict of nn.EmbeddingBag, or Parquet",
    ),
    "import": ("skirl.checkpoint.commands:Import", "a checkpoint of the rows of a trained PyTorch model"),
    "bench oracle": (
        "skirl.measure.bench.oracle:Oracle",
        "time the planner: ids a second, slots and grouping included",
    ),
    "bench disk": (
        "skirl.measure.bench.disk:Disk",
        "reads and writes through the disk store, beside the device's own rates",
    ),
    "bench train": (
        "skirl.measure.bench.train:TrainSpeed",
        "training speed beside every row resident, torch, FBGEMM, LRU, on demand",
    ),
    "bench curves": (
        "skirl.measure.bench.curves:Curves",
        "CPU time of a step as batch, tables, dim, depth, rows and threads grow",
    ),
    "bench traffic": (
        "skirl.measure.bench.traffic:Traffic",
        "count the rows that each policy fetches on a trace of ids",
    ),
    "bench rows": ("skirl.measure.bench.rows:Rows", "time the embedding step beside FBGEMM and nn.EmbeddingBag"),
    "bench kernels": (
        "skirl.measure.bench.kernels:Kernels",
        "the kernels of a GPU against the rate at which it copies memory",
    ),
    "bench checkpoint": (
        "skirl.measure.bench.checkpoint:Checkpoint",
        "how long training stands still at a checkpoint, its bytes and memory",
    ),
    "bench readers": (
        "skirl.measure.bench.readers:Readers",
        "rows a second out of text and Parquet, beside TorchRec, and memory over a long stream",
    ),
    "bench start": (
        "skirl.measure.bench.start:Start",
        "time compiling and loading the kernels of a first training step",
    ),
}
OVERVIEW = """usage: skirl COMMAND [flags]

{commands}

skirl COMMAND --help lists the flags; skirl --version says which skirl this is.
Exit codes: 0 done; 1 the run, or what it checks, failed; 2 a wrong flag or value; 130 stopped by Ctrl-C.
SKIRL_TRACEBACK=1 in the environment shows where an error came from."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, without the word `skirl`; the exit code.

    >>> main(["trian"])
    2
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if args == ["--version"]:
        return _print(f"skirl {import_module('skirl.tools.sealed_json').skirl_version()}")
    if args in (["-h"], ["--help"]):
        return _print(_overview())
    words = next((n for n in (2, 1) if " ".join(args[:n]) in COMMANDS), 0)
    if not words:
        return _unknown(args)
    name = " ".join(args[:words])
    try:
        return _run(name, _parse(name, args[words:]))
    except KeyboardInterrupt:
        print(f"skirl {name}: stopped by Ctrl-C", file=sys.stderr)
        return 130


def _parse(name: str, args: list[str]) -> Any:
    """The subcommand, its flags read and checked; leaves with exit code 2 where they are wrong."""
    import tyro  # 0.1 s that an overview does not need

    (module, _, owner), text = COMMANDS[name][0].partition(":"), COMMANDS[name][1]
    command = getattr(import_module(module), owner)
    no_pairs = (tyro.conf.FlagCreatePairsOff,)  # --json, and no --no-json
    return tyro.cli(command, prog=f"skirl {name}", args=args, description=f"{text.capitalize()}.", config=no_pairs)


def _run(name: str, command: Any) -> int:
    try:
        result: Mapping[str, Any] = command.run()
        print(json.dumps(result) if command.json else listed(command.summary(result)))
    except BrokenPipeError:  # whoever read our output has gone; the interpreter would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("SKIRL_TRACEBACK") or not _is_a_sentence(error):
            raise
        print(f"skirl {name}: {error}", file=sys.stderr)
        return 1
    if result.get("failed"):
        print(f"skirl {name}: {result['failed']}", file=sys.stderr)
        return 1
    return 0


def _is_a_sentence(error: Exception) -> bool:
    """Whether an error says by itself what to do; of any other one the traceback is worth more."""
    return isinstance(error, ValueError | OSError) or type(error).__module__.startswith("skirl.")


def _unknown(args: list[str]) -> int:
    given = " ".join(args[:2] if args[:1] == ["bench"] else args[:1])
    near = difflib.get_close_matches(given, COMMANDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    print(f"skirl: {given!r} is no command{hint}" if args else "skirl: name a command", file=sys.stderr)
    print(f"\n{_overview()}", file=sys.stderr)
    return 2


def _overview() -> str:
    lines = [f"  {name:<17}{text}" for name, (_, text) in COMMANDS.items()]
    return OVERVIEW.format(commands="\n".join(lines))


def _print(text: str) -> int:
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
