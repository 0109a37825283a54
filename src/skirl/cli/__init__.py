"""The command `skirl`: finds the subcommand, a dataclass of flags, whose `run()` returns the result, with the reason under
`failed` if it failed, and whose `summary(result)` formats it for people."""

import difflib
import json
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from skirl.cli.command_line import CONFIG, in_flags, read_flags
from skirl.cli.show import listed, progress
from skirl.peers.processes import BEGINS_AGAIN, die_with_launcher, launched_here, leave_stop, says_first
from skirl.tools import __version__
from skirl.tools.flags import Composed, WrongFlags, flags_of, flat_of
from skirl.tools.os_errors import said
from skirl.tools.progress import shown_by

COMMANDS = {
    "train": ("skirl.cli.train:Train", "train a model whose tables are larger than the cache"),
    "verify": ("skirl.cli.train:Verify", "train with a cache, without, and in plain Python; compare all bits"),
    "size": ("skirl.cli.plan:Size", "show how much cache a run needs, and what to choose"),
    "place": ("skirl.cli.plan:Place", "plan which of TorchRec's ranks keeps which tables, or parts of them"),
    "sweep": ("skirl.cli.sweep:SweepCommand", "train variants of a model on one stream; drop the worse half at rungs"),
    "report": ("skirl.cli.report:Report", "show what a run or a sweep did, with a page of plots"),
    "launch": ("skirl.cli.train:Launch", "start trainers of one job here: skirl launch -n 2 -- train ..."),
    "serve": ("skirl.store.remote.serve:Serve", "keep rows for trainers on other machines, as a memory node"),
    "evaluate": ("skirl.cli.train:Evaluate", "compute the metrics of a trained model on the data that you name"),
    "predict": ("skirl.cli.train:Predict", "write the predictions of a trained model as Parquet"),
    "schema": ("skirl.cli.files:Schema", "draft a schema of your Parquet, CSV or TSV files"),
    "vocab": ("skirl.cli.files:Vocab", "give the ids in data files rows of their own"),
    "convert": ("skirl.cli.files:Convert", "write data files as Parquet that is read several times faster"),
    "analyze": ("skirl.cli.files:Analyze", "find out whether it pays to write data by session"),
    "export": ("skirl.cli.files:Export", "write rows as safetensors, a state dict of nn.EmbeddingBag, or Parquet"),
    "import": ("skirl.cli.files:Import", "make a checkpoint of the rows of a trained PyTorch model"),
    "info": ("skirl.cli.files:Info", "tell what a checkpoint, store, vocabulary, Parquet file or predictions are"),
}
NOBODY_READS = 128 + 13
"""The exit code that shells report for a process killed by SIGPIPE: `skirl train | head` ends as `yes | head` does."""
STOPPED = 128 + 2
"""The exit code that shells report for a process ended by Ctrl-C."""
LAUNCH = "launch"
OVERVIEW = """usage: skirl COMMAND [flags]

{commands}

skirl COMMAND --help lists the flags; skirl --version says which skirl this is.
Exit codes: 0 done; 1 the run, or what it checks, failed; 2 a wrong flag or value; 75 stopped before the end, on one of
several machines; 130 stopped by Ctrl-C; 137 a trainer of skirl launch was killed; 141 nobody reads its output any more.
SKIRL_TRACEBACK=1 in the environment shows where an error came from."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, given without the word `skirl`, and return the exit code.

    >>> main(["trian"])
    2
    """
    die_with_launcher()  # before anything slow
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: its idle threads would spin
    try:
        code = _main(list(sys.argv[1:] if argv is None else argv))
    except SystemExit as left:  # after help, or of a wrong flag
        code = left.code if isinstance(left.code, int) else 1
    except BrokenPipeError as error:
        return _unwritable(error)
    try:
        sys.stdout.flush()
    except OSError as error:
        return _unwritable(error)
    return code


def _unwritable(error: OSError) -> int:
    if not isinstance(error, BrokenPipeError):
        print(f"skirl: the output could not be written: {said(error)}", file=sys.stderr)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())  # else the interpreter complains at exit
    return NOBODY_READS if isinstance(error, BrokenPipeError) else 1


def _main(args: list[str]) -> int:
    overview = OVERVIEW.format(commands="\n".join(f"  {name:<11}{says}" for name, (_, says) in COMMANDS.items()))
    if args in (["-h"], ["--help"], ["--version"]):
        version = args == ["--version"]
        print(f"skirl {__version__}" if version else overview)
        return 0
    if not args or args[0] not in COMMANDS:
        near = difflib.get_close_matches(args[0], COMMANDS, n=1) if args else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        wrong = f"{args[0]!r} is not a command{hint}" if args else "no command is named: name one of those below"
        print(f"skirl: {wrong}\n\n{overview}", file=sys.stderr)
        return 2
    name, code = args[0], 2  # of a wrong flag
    try:
        try:
            command, *shown = _parse(name, args[1:])
            if name == "sweep" and (processes := command.ranks()) > 1:
                name, args = LAUNCH, [LAUNCH, "-n", str(processes), "--", *args]
                command, *shown = _parse(name, args[1:])
            code = 1
            done = _run(args, command, *shown)
            if "skirl.peers.job" in sys.modules:
                sys.modules["skirl.peers.job"].leave()
            return done
        except Exception as error:
            return _failed(name, error, 2 if isinstance(error, WrongFlags) else code)
    except KeyboardInterrupt as left:
        print(f"skirl {name}: stopped by Ctrl-C{left}", file=sys.stderr)
        return STOPPED


def _run(args: list[str], command: Any, as_json: bool, quiet: bool) -> int:
    name = args[0]
    first = os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"
    display = partial(progress, sys.stderr if as_json else sys.stdout) if first and not quiet else None
    with shown_by(display):
        result = {"command": name, "failed": None, **flat_of(command), **command.run()}
    failed, trains = result["failed"], name in ("train", "sweep")
    stopped = result["stopped_by"] if trains else None
    if trains and not failed:
        leave_stop()
    if not first or "exit_code" in result:  # the first trainer, or the command that was started, shows the rest
        pass
    elif as_json:
        print(json.dumps(result))
    elif stopped and not failed:
        print(f"stopped by {stopped} after step {result['steps']:,}, saved in {result['save']}; --resume goes on")
    else:
        shown = command.summary(result)
        print(shown if isinstance(shown, str) else listed(shown))
    if failed and (first or "exit_code" in result):  # a launch has no rank, whatever the environment says
        print(f"skirl {name}: {failed}", file=sys.stderr)
    usual = BEGINS_AGAIN if result.get("begins_again") else STOPPED if stopped == "Ctrl-C" else 0
    return result.get("exit_code", 1 if failed else usual)


def _failed(name: str, error: Exception, code: int) -> int:
    """Print an error whose message is meant for users; raise any other, to show its traceback."""
    if "skirl.peers.job" in sys.modules or launched_here():
        import_module("skirl.peers.job").fail(error)  # or the other trainers would wait for this one
    is_sentence = isinstance(error, ValueError | OSError) or type(error).__module__.startswith("skirl.")
    if isinstance(error, BrokenPipeError) or os.environ.get("SKIRL_TRACEBACK") or not is_sentence:
        raise error
    text = said(error)
    new = says_first(re.sub(r"^rank \d+ ended the job: ", "", text))
    if isinstance(error, ValueError):
        text = in_flags(text, [CONFIG.name, *flags_of(_command(name))])
    if new:
        print(f"skirl {name}: {text}", file=sys.stderr)
    return code


def _parse(name: str, args: list[str]) -> tuple[Any, bool, bool]:
    kind, words = _command(name), []
    if name == LAUNCH:
        if "--" not in args and not COMMANDS.keys().isdisjoint(args):
            _check_launched([])
        at = args.index("--") if "--" in args else len(args)
        args, words = [re.sub("^-n(?=$|=)", "--trainers", arg) for arg in args[:at]], args[at + 1 :]
        words = words[words[:1] == ["skirl"] :]
    values = read_flags(name, COMMANDS[name][1], kind, args)
    command: Any = kind.of(**values) if issubclass(kind, Composed) else kind(**values)
    if name == LAUNCH:
        command.words = words
        _check_launched(words)
    return command, bool(values.get("json")), bool(values.get("quiet"))


def _check_launched(words: list[str]) -> None:
    """Raise what every trainer would raise, before any is started."""
    if not words:
        raise ValueError("nothing is launched: write a command after --, as in `skirl launch -n 2 -- train ...`")
    if words[0] in COMMANDS and words[0] != LAUNCH:
        _parse(words[0], words[1:])
    elif not words[0].endswith(".py"):
        raise ValueError(f"{words[0]!r} cannot be launched: write a command after --, such as train, or a Python file")
    elif not Path(words[0]).is_file():
        raise ValueError(f"{words[0]} does not exist: name a Python file that does")


def _command(name: str) -> Any:
    module, _, owner = COMMANDS[name][0].partition(":")
    return getattr(import_module(module), owner)
