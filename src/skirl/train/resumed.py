"""Checks that a run may go on with other flags than it was saved with, and lists what changes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skirl.checkpoint.codec import decode
from skirl.tools.flags import option
from skirl.tools.sealed_json import CheckpointError

Change = dict[str, Any]
"""A flag with another value from a step on: `flag`, `was`, `is` and `step`."""

OF_A_START = frozenset(
    ("run", "trace", "save", "save_every", "save_minutes", "keep", "keep_best", "resume", "from_", "json", "quiet", "wandb",
     "log_every", "assert_ratio")
)  # fmt: skip
"""Flags that say what a start of a run writes and shows, not what it trains."""
FREE = frozenset(
    ("lr", "dense_lr", "threads", "steps", "epochs", "cache", "depth", "policy", "store", "prefetch", "device",
     "workers", "eval_every", "patience", "peer_patience")
)  # fmt: skip
"""Flags that may change when a run goes on; the new values apply from there on."""
OF_FILES = frozenset(("data", "schema", "rows", "vocab", "valid"))
"""Flags of files, which may be spelled differently: the stream of batches itself checks that it is the same."""
LEARNING = ("lr", "dense_lr", "threads")
"""The free flags that change what is learned."""


def run_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state of a checkpoint's run folder: `folder`, `flags`, `changes`. None if `skirl train` did not save it."""
    for part in body["run"]["optimizers"]:
        if part["type"] == "RunFolder":
            return decode(part["state"], {})
    return None


def saved_flags(path: Path) -> dict[str, Any]:
    """Return the flags that a folder's newest readable checkpoint was saved with; empty if it does not say."""
    from skirl.checkpoint import folder  # imports torch, which reports do without

    for header in folder.headers(path):
        try:
            return dict((run_of(folder.read(header)) or {}).get("flags", {}))
        except CheckpointError:  # loading it reports what is wrong with it
            continue
        except (KeyError, TypeError, ValueError, AttributeError):
            return {}
    return {}


def changes_between(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[Change]:
    """Return the flags that may change and differ from the saved ones.

    >>> changes_between({"lr": 0.1, "dim": 4, "quiet": True}, {"lr": 0.2, "dim": 4, "quiet": False})
    [{'flag': 'lr', 'was': 0.1, 'is': 0.2}]
    """
    names = [name for name in here if name in saved and name in FREE | OF_FILES]
    return [
        {"flag": name, "was": saved[name], "is": here[name]}
        for name in names
        if _plain(saved[name]) != _plain(here[name])
    ]


def check_flags(saved: Mapping[str, Any], here: Mapping[str, Any], *, may: frozenset[str], then: str) -> None:
    """Raise if flags differ from those of the saved run, naming them with both values.

    >>> check_flags({"dim": 16, "lr": 0.1}, {"dim": 32, "lr": 0.2}, may=FREE, then="set it to that")
    Traceback (most recent call last):
    ValueError: --dim is 32, the run was saved with 16: set it to that
    """
    may = may | OF_A_START | (OF_FILES if _of_files(saved) and _of_files(here) else frozenset())
    others = [n for n in here if n in saved and n not in may and _plain(saved[n]) != _plain(here[n])]
    if others:
        texts = [f"{option(n)} is {shown(here[n])}, the run was saved with {shown(saved[n])}" for n in others[:4]]
        more = f" (and {len(others) - 4} more)" if len(others) > 4 else ""
        raise ValueError("; ".join(texts) + more + f": {then}")


def told(changes: list[Change]) -> list[str]:
    """Return a sentence for each change.

    >>> told([{"flag": "dense_lr", "was": 0.1, "is": 0.01, "step": 40}])
    ['--dense-lr is 0.01 from step 40 on, it was 0.1']
    """
    return [
        f"{option(c['flag'])} is {shown(c['is'])} from step {c['step']:,} on, it was {shown(c['was'])}" for c in changes
    ]


def shown(value: Any) -> str:
    """Return a flag's value as text, as it is given on the command line."""
    if value is None:
        return "not set"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _of_files(flags: Mapping[str, Any]) -> bool:
    return not str(flags.get("data", "synthetic:")).startswith("synthetic:")
