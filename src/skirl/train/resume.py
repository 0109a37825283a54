"""What a run goes on with, or begins from: which flags may change, which checkpoint and data it is, and what is refused."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skirl.checkpoint import folder
from skirl.models.flags import LayerFlags, ModelFlags
from skirl.tools.flags import option
from skirl.train.flags import SaveFlags

if TYPE_CHECKING:
    from torch import Tensor, nn

    from skirl.data.files.schema import FileSchema
    from skirl.data.files.stream import Files
    from skirl.data.source import Source
    from skirl.nn.collection import TablePlace
    from skirl.train.loop import TrainerShare

log = logging.getLogger("skirl")
# torch and the readers take a second to import, which reports and help do without: they are imported where they are used.


Change = dict[str, Any]
"""A flag with another value from a step on: `flag`, `was`, `is` and `step`."""

RULES: Mapping[str, frozenset[str]] = {
    "unseen": frozenset(
        ("run", "trace", "save", "save_every", "save_minutes", "keep_last", "keep_best", "resume", "from_", "json", "quiet",
         "log_every")
    ),
    "free": frozenset(
        ("steps", "epochs", "cache", "depth", "policy", "store", "prefetch", "device", "workers", "eval_every", "patience",
         "peer_timeout", "placement")
    ),
    "warned": frozenset(("lr", "dense_lr", "threads")),
    "files": frozenset(("data", "schema", "rows", "vocab", "valid")),
}  # fmt: skip
"""What becomes of a flag whose value is not that of the saved run. unseen: it says what a start writes and shows. free: it
applies from there on, and the result lists it. warned: the same, with a warning, since it changes what is learned. files: a
path may be spelled differently, and the stream of batches itself checks that it is the same. All others are refused."""
FREE = RULES["free"] | RULES["warned"]


def run_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of a checkpoint's run folder: `folder`, `flags`, `changes`. None if `skirl train` did not save it."""
    from skirl.checkpoint.codec import decode

    for part in body["run"]["optimizers"]:
        if part["type"] == "RunFolder":
            return decode(part["state"], {})
    return None


def saved_flags(path: Path) -> dict[str, Any]:
    """The flags that a folder's newest readable checkpoint was saved with; empty if none says so."""
    with suppress(KeyError, TypeError, ValueError, AttributeError):  # loading it reports what is wrong with it
        return next((dict((run_of(body) or {}).get("flags", {})) for _, body in folder.readable(path)), {})
    return {}


def changes_between(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[Change]:
    """The flags that may change and differ from the saved ones.

    >>> changes_between({"lr": 0.1, "dim": 4, "quiet": True}, {"lr": 0.2, "dim": 4, "quiet": False})
    [{'flag': 'lr', 'was': 0.1, 'is': 0.2}]
    """
    differ = [n for n in here if n in saved and n in FREE | RULES["files"] and _plain(saved[n]) != _plain(here[n])]
    return [{"flag": name, "was": saved[name], "is": here[name]} for name in differ]


def check_flags(saved: Mapping[str, Any], here: Mapping[str, Any], *, may: frozenset[str], then: str) -> None:
    may = may | RULES["unseen"] | (RULES["files"] if _of_files(saved) and _of_files(here) else frozenset())
    others = [n for n in here if n in saved and n not in may and _plain(saved[n]) != _plain(here[n])]
    if others:
        texts = [f"{option(n)} is {shown(here[n])}, the run was saved with {shown(saved[n])}" for n in others]
        raise ValueError("; ".join(texts) + f": {then}")


def told(changes: list[Change]) -> list[str]:
    return [
        f"{option(c['flag'])} is {shown(c['is'])} from step {c['step']:,} on, it was {shown(c['was'])}" for c in changes
    ]


def shown(value: Any) -> str:
    if value is None:
        return "not set"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _of_files(flags: Mapping[str, Any]) -> bool:
    return not str(flags.get("data", "synthetic:")).startswith("synthetic:")


OF_MODEL = frozenset(field.name for part in (ModelFlags, LayerFlags) for field in fields(part))


def check_start(saving: SaveFlags, flags: Mapping[str, Any]) -> bool:
    """Raise if the flags do not fit the checkpoint that the run begins from. Return whether that is another run's."""
    save, from_ = saving.save, saving.from_
    if save is not None and not saving.resume:
        folder.refuse_checkpoints(save)
    elif save is not None:
        folder.refuse_sweep(save)
        if save.exists() and not save.is_dir():
            raise ValueError(f"save is {save}, which is a file: a checkpoint is a folder, name another")
        if folder.numbers(save):
            if from_ is not None:
                log.warning("%s holds a checkpoint: the run goes on with it, and takes nothing from %s", save, from_)
            then = "set it to that to go on, or begin a new run with another --save (and --from, to take rows along)"
            # FTRL's rows are computed from their state and lr.
            may = FREE - {"lr"} if flags["optimizer"] == "ftrl" else FREE
            check_flags(saved_flags(save), flags, may=may, then=then)
            return False
    if from_ is None:
        return False
    headers = folder.headers(from_)
    header, _ = next(folder.readable(from_), (headers[0], None))  # other damage shows when it is opened
    folder.read(header)
    then = f"its weights fit no other model, so set what {from_} has"
    check_flags(saved_flags(header), flags, may=frozenset(flags) - OF_MODEL, then=then)
    return True


def agreed_start(share: "TrainerShare", saving: SaveFlags, flags: Mapping[str, Any]) -> bool:
    """Do `check_start` on the first trainer for all of them, since files of the run appear as soon as one begins."""

    from skirl.checkpoint.votes import agreed, told

    tag = "where the run begins"
    return told(share.peers, agreed(share.peers, lambda: share.first and check_start(saving, flags), tag), tag)[0]


# Another run's rows and weights, at step 0 of other data


def begin_from(path: Path, model: "nn.Module", stream: "Source", share: "TrainerShare") -> dict[str, Any]:
    """Copy rows and dense weights from a checkpoint. Check everything before changing anything."""
    import torch

    from skirl.checkpoint.import_rows import copy_rows, opened
    from skirl.nn.collection import collections_of, tables_of

    with opened(path, share.peers) as (rows, dense, data, _):
        here, theirs = tables_of(model), tables_of(rows)
        _check_tables(here, theirs, path)
        _check_ids(data, stream.state_dict(), path, share.first)
        weights = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        if dense:
            _check_weights(weights, dense, path)
            model.load_state_dict({name: dense[name] for name in weights}, strict=False)
        else:
            if share.first:
                log.warning("%s has rows and no dense weights: these begin at their initial values", path)
        taken = copy_rows(here, theirs, path)
        same = all(place.optimizer.rule == theirs[name].optimizer.rule for name, place in here.items())
        same &= any(place.pack.steps[place.number] for place in theirs.values())  # else it begins at zero there
    for collection in collections_of(model).values():
        collection.forget()
    came = share.total({"rows": sum(taken.values())})
    return {"folder": str(path), **came, "row_state": same, "dense": bool(dense)}


def _check_tables(here: Mapping[str, "TablePlace"], theirs: Mapping[str, "TablePlace"], path: Path) -> None:
    if other := sorted(here.keys() ^ theirs.keys()):
        has, lacks = (path, "--data") if other[0] in theirs else ("--data", path)
        raise ValueError(
            f"{has} has a table {other[0]!r} and {lacks} has none: give data with the same tables"
            + ", or import only these with --table" * (has == path)
        )
    for name, place in here.items():
        mine, other = place.table, theirs[name].table
        if mine.rows != other.rows:
            raise ValueError(
                f"table {name!r} has {mine.rows:,} rows by --data and --rows, and {other.rows:,} in {path}: set them to that"
            )


def _check_ids(theirs: Any, mine: Any, path: Path, first: bool) -> None:
    """Raise if ids would become other rows than before: each row would be trained further as that of another id."""
    from skirl.data.files.hashing import BY_OPEN
    from skirl.data.vocabulary.vocabulary import stream_of

    saved, now = stream_of(theirs), stream_of(mine)
    if first and theirs is None and now is not None and 'encode = "hash"' in now.get("schema", ""):
        log.warning(
            "%s does not say which ids its rows are of, and the schema hashes ids: to take ids as row numbers, set encode = "
            '"row" in it',
            path,
        )
    if saved is None or now is None:  # not from files, or not read from yet
        return
    if BY_OPEN in (saved["rows_of"], now["rows_of"]):
        raise ValueError(
            f"--vocab open numbers rows as ids arrive, so ids of this run would get other rows than in {path}: make a "
            "vocabulary with skirl vocab for both runs, or hash ids"
        )
    if saved["rows_of"] != now["rows_of"]:
        raise ValueError(
            f"--vocab makes rows of ids {now['rows_of']}, in {path} it was {saved['rows_of']}: set --vocab to what it was"
        )


def _check_weights(here: Mapping[str, "Tensor"], theirs: Mapping[str, "Tensor"], path: Path) -> None:
    for name, value in here.items():
        if name not in theirs or theirs[name].shape != value.shape:
            there = list(theirs[name].shape) if name in theirs else "not there"
            raise ValueError(
                f"{name} is {list(value.shape)} by --model, and {there} in {path}: set --model to what it was"
            )


# The data of a saved run


def check_same_data(stream: Mapping[str, Any], files: "Files") -> None:
    """Raise if a model would take files otherwise than those of its run; `stream` is the state of these. Tables and rows are
    compared by loading. In converted files, dense columns are already as the model takes them, and ids may be rows."""
    from skirl.data.files.schema import FileSchema

    there, here = FileSchema.parse(stream["schema"]), files.encoder.schema
    both = [("dense columns", ", ".join(there.dense_names) or "none", ", ".join(here.dense_names) or "none")]
    for table in there.kinds.keys() & here.kinds.keys():
        both.append((f"kind of ids of table {table!r}", there.kinds[table], here.kinds[table]))
    if there.kinds and here.kinds:
        both.append(("ids became rows", stream["rows_of"], files.encoder.rows_of.described))
    if not (_converted(there) or _converted(here)):
        for was, now in zip(there.dense, here.dense):
            both += [
                (f"{what} of {was.name!r}", getattr(was, what), getattr(now, what)) for what in ("transform", "fill")
            ]
    for what, was, now in both:
        if was != now:
            raise ValueError(f"the run's {what}: {was}, and here: {now}: set data, schema and vocab to the run's")


def _converted(schema: "FileSchema") -> bool:
    return all(column.type == "fingerprint" or column.encode == "row" for column in schema.ids)
