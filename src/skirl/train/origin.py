"""The origin of a run: noted in its folder of checkpoints before anything is copied, in case the start is killed."""

import hashlib
import logging
import secrets
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from skirl.checkpoint import folder
from skirl.checkpoint.of_sweep import refuse_sweep
from skirl.tools.os_errors import why
from skirl.tools.sealed_json import TEXT, CheckpointError, misfit, read_sealed, skirl_version, write_sealed

log = logging.getLogger("skirl")

NAME = "begun-from.json"
FORMAT, VERSION = "skirl-begun-from", 1
_OTHER = "begin a new run with another --save"


class Origin(NamedTuple):
    """A checkpoint that a run begins from."""

    given: str
    """The path as --from gave it."""
    header: Path
    digest: str
    """The SHA-256 of the header, which holds those of all its files."""
    again: bool = False
    """True if the run began from this checkpoint before, so that no other will do."""

    @classmethod
    def of(cls, given: str, header: Path) -> Self:
        """Return the origin of an existing header."""
        return cls(given, header, _digest(header))


class Begins(Protocol):
    """The flags that say where a run begins."""

    @property
    def save(self) -> Path | None: ...

    @property
    def resume(self) -> bool: ...

    @property
    def from_(self) -> Path | None: ...


def origin_of(saving: Begins, *, saved: bool | None = None) -> Origin | None:
    """Return the checkpoint that the run takes rows and weights from. None if it goes on with its own, or takes none."""
    save, from_ = saving.save, saving.from_
    if save is None:
        return _newest(from_)
    if not saving.resume:
        from skirl.checkpoint.keeper import refuse_checkpoints  # needs torch, which reading a note does not

        refuse_checkpoints(save)
        return _newest(from_)
    if saved is None:
        refuse_sweep(save)
        if save.exists() and not save.is_dir():
            raise ValueError(f"save is {save}, which is a file: a checkpoint is a folder, name another")
    noted = read(save)
    if folder.holds_some(save) if saved is None else saved:
        if from_ is not None and not (noted is not None and _means(from_, noted)):
            began = "from no other run" if noted is None else f"from {noted.header}"
            raise ValueError(
                f"--from is {from_}, and the run in {save} began {began}: leave --from out to go on with it, or {_OTHER}"
            )
        return None
    if noted is None:
        if from_ is None and saved is not None:  # `train` says so itself, once nothing else is refused
            log.warning("%s holds no checkpoint: the run begins, at step 0", save)
        return _newest(from_)
    if from_ is not None and not _means(from_, noted):
        raise ValueError(
            f"--from is {from_}, and the run in {save} began from {noted.header}: leave --from out to begin it from there "
            "again, or leave --resume out to begin another one"
        )
    for header in [noted.header, *(_headers(from_) if from_ is not None else [])]:
        if header.is_file() and _digest(header) == noted.digest:
            log.warning("%s holds no checkpoint: the run begins again, from %s", save, header)
            return noted._replace(header=header, again=True)
    raise ValueError(
        f"the run in {save} began from {noted.header}, which is gone or has been replaced: give the folder that it is in "
        "now with --from, or begin another run with --from and without --resume"
    )


def note(save: Path, origin: Origin | None) -> None:
    """Note what the run in a folder begins from, or remove the note of an earlier run if there is no origin."""
    path = save / NAME
    try:
        if origin is None:
            if path.exists():
                path.unlink()
            return
        save.mkdir(parents=True, exist_ok=True)
        body = {"format": FORMAT, "format_version": VERSION, "skirl": skirl_version()}
        body |= {"from": origin.given, "checkpoint": str(origin.header.absolute()), "sha256": origin.digest}
        write_sealed(path, body, secrets.token_hex(8))
    except OSError as error:
        log.warning(
            "%s could not be written, %s: should the run be killed before its first checkpoint, begin it with --from again",
            path,
            why(error, save),
        )


def read(save: Path) -> Origin | None:
    """Return the origin noted in a folder. None if there is none, or one that a checkpoint replaces."""
    path = save / NAME
    if not path.exists():
        return None
    try:
        body = read_sealed(path, format=FORMAT, version=VERSION, what="note of what a run began from")
        if (wrong := misfit(body, {"from": TEXT, "checkpoint": TEXT, "sha256": TEXT})) is not None:
            raise CheckpointError(f"{path} is wrong: {wrong}")
    except CheckpointError:
        if folder.holds_some(save):  # the note is no longer needed
            return None
        raise CheckpointError(
            f"{path} says what the run began from, and is damaged: begin it with --from and without --resume"
        ) from None
    return Origin(body["from"], Path(body["checkpoint"]), body["sha256"])


def _means(from_: Path, noted: Origin) -> bool:
    """Return whether --from names the place that was noted, or one where the same checkpoint is now."""
    if from_.absolute() in (noted.header, noted.header.parent):
        return True
    return any(_digest(header) == noted.digest for header in _headers(from_) if header.is_file())


def _headers(path: Path) -> list[Path]:
    try:
        return folder.headers(path)
    except CheckpointError:
        return []


def _newest(from_: Path | None) -> Origin | None:
    """Return the newest checkpoint with a readable header. Other damage shows when it is opened."""
    if from_ is None:
        return None
    headers = folder.headers(from_)
    for header in headers:
        try:
            folder.read(header)
        except CheckpointError:
            continue
        return Origin.of(str(from_), header)
    folder.read(headers[0])
    raise AssertionError


def _digest(header: Path) -> str:
    return hashlib.sha256(header.read_bytes()).hexdigest()
