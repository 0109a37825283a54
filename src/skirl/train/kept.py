"""The start of a run from checkpoints, and the part of its summary about those that it leaves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skirl.checkpoint import best, numbers
from skirl.train.evaluation import Evaluation
from skirl.train.fine_tuning import check_model
from skirl.train.flags import SaveFlags
from skirl.train.origin import Origin, origin_of
from skirl.train.resumed import FREE, check_flags, saved_flags, told
from skirl.train.trainers import TrainerShare


def check_start(saving: SaveFlags, flags: Mapping[str, Any]) -> Origin | None:
    """Raise if the flags do not fit the checkpoint that the run begins from. Read nothing of it but its flags.

    Returns the checkpoint if it is another run's.
    """
    origin = origin_of(saving)
    if origin is not None:
        check_model(Path(origin.given), origin.header, flags)
    elif saving.resume and saving.save is not None and numbers(saving.save):
        then = "set it to that to go on, or begin a new run with another --save (and --from, to take rows along)"
        may = FREE - {"lr"} if flags["optimizer"] == "ftrl" else FREE  # its rows are computed from their state and lr
        check_flags(saved_flags(saving.save), flags, may=may, then=then)
    return origin


def agreed_start(share: TrainerShare, saving: SaveFlags, flags: Mapping[str, Any]) -> Origin | None:
    """Do `check_start` on the first trainer for all of them, since files of the run appear as soon as one begins."""

    def found() -> list[Any] | None:
        origin = check_start(saving, flags)
        return None if origin is None else [origin.given, str(origin.header), origin.digest, origin.again]

    told_of = share.of_first(found, "where the run begins")
    if told_of is None:
        return None
    given, header, digest, again = told_of
    return Origin(given, Path(header), digest, again)


def best_of(kept: Mapping[str, Any], judge: Evaluation) -> dict[str, Any] | None:
    """Return facts about the checkpoint that --keep-best kept: folder, step, held-out log loss. None if there is none."""
    found = kept["best"]
    if found is None:
        return None
    return {**found, "test_logloss": judge.best if judge.best_step == found["step"] else None}


def not_saved(saving: SaveFlags, kept: Mapping[str, Any], step: int) -> str | None:
    """Say why a promised checkpoint, that of the run's end or the best, is not there. Return None if all are."""
    if saving.save is None:
        return None
    if kept["newest"] != step:
        newest = kept["newest"]
        then = "no step of this run is saved" if newest is None else f"the newest that is saved is step {newest:,}"
        return f"{kept['last_failure'] or f'step {step:,} is not saved'}; {then}"
    if saving.keep_best and kept["best_failure"] is not None:
        return f"{kept['best_failure']} in {saving.save / best.NAME}"
    return None


def saved_line(saving: SaveFlags, result: Mapping[str, Any]) -> str:
    """Return what the summary says of checkpoints."""
    kept, folder = result["checkpoints"], saving.save
    newest = kept["newest"]
    first = "nothing" if newest is None else f"step {newest:,} in {folder}; more --steps and --resume go on from there"
    lines = [first]
    if kept["failed"]:
        lines.append(f"{kept['failed']} more could not be written: {kept['last_failure']}")
    return "\n".join(lines)


def nothing_left(result: Mapping[str, Any], steps: int | None) -> str | None:
    """Return what the summary says of a resumed run that had no step left to train; None if it trained."""
    at = result["steps"]
    if not at or result["begun_at"] < at:
        return None
    past = steps is not None and at > steps
    how = f"is past --steps {steps}," if past else "had stopped early" if result["stopped_early"] else "had ended"
    return f"the run {how} at step {at:,}: nothing was left to train"


def origin_line(begun: Mapping[str, Any]) -> str:
    """Return what a summary says of the run that another began from."""
    state = "with their optimizer's state" if begun["row_state"] else "whose optimizer's state starts from zero"
    return f"with {begun['rows']:,} rows out of {begun['folder']}, {state}"


def outcome(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the summary's lines on the best checkpoint, the run's origin, changed flags, and what is missing."""
    lines = {}
    if (best_one := result["best"]) is not None:
        loss = best_one["test_logloss"]
        scored = "" if loss is None else f", log loss {loss:.4f} on the samples held out"
        lines["best"] = f"step {best_one['step']:,}{scored}, in {best_one['folder']}"
    if (begun := result["from"]) is not None:
        lines["begun"] = origin_line(begun)
    if result["changes"]:
        lines["changed"] = "\n".join(told(result["changes"]))
    if result["missing"]:
        lines["missing"] = "\n".join(result["missing"])
    return lines
