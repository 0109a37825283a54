"""A checkpoint of a sweep: a checkpoint of each variant still in the race, and a header that names those of one step."""

import base64
import difflib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skirl.checkpoint import folder
from skirl.checkpoint.best import headers_with_steps
from skirl.checkpoint.load_run import load
from skirl.checkpoint.save_run import save
from skirl.checkpoint.saving import Saving
from skirl.pipeline.lookahead import Lookahead
from skirl.sweep.contender import Contender
from skirl.sweep.names import HEADER, SWEEP
from skirl.tools.os_errors import NotWritten, of_system, why
from skirl.tools.sealed_json import CheckpointError, OtherVersion, read_sealed, skirl_version, write_sealed

log = logging.getLogger("skirl")

FORMAT = "skirl-sweep-checkpoint"
_VERSION, _READ = 2, (1, 2)
"""The version that is written, and those that are read. A sweep of version 1 cannot go on: its race did not know yet which
losses are of samples that nobody had trained on."""

Parts = Callable[[Contender], Sequence[Any]]


def optimizers_of(contender: Contender) -> list[Any]:
    """Return what is saved of a variant besides its model and rows: its optimizer, if it has one.

    **Arguments**

    - `contender`: the variant.
    """
    return [] if contender.dense is None else [contender.dense]


class SweepSaving:
    """A checkpoint of a sweep that is being written: those of its variants in parallel, then the header.

    **Arguments**

    - `path`: the folder.
    - `step`: of the sweep.
    - `savings`: the checkpoint of each variant, by name.
    - `body`: the rest of the header; None if somebody else writes the header, and then calls `confirmed`.
    """

    def __init__(self, path: Path, step: int, savings: Mapping[str, Saving], body: Mapping[str, Any] | None) -> None:
        self.path, self.step = path, step
        self.failure: BaseException | None = None
        """The error that keeps it from ever being on disk, if any."""
        self.names = {name: saving.path.name for name, saving in savings.items()}
        """The checkpoint of each variant, as the header names it."""
        self._savings, self._told = dict(savings), False
        self._body = body
        self._thread = threading.Thread(target=self._write, name="skirl checkpoint of a sweep")
        self._thread.start()

    @property
    def done(self) -> bool:
        """True once it is on disk or has failed."""
        return not self._thread.is_alive()

    def ended(self) -> None:
        """Wait until it is on disk or has failed."""
        while self._thread.is_alive():
            self._thread.join(0.1)  # in short waits, so that Ctrl-C gets through

    def wait(self) -> "SweepSaving":
        """Wait until the checkpoint is on disk. Raise the error if it could not be written, but only once."""
        self.ended()
        if self.failure is not None and not self._told:
            self._told = True
            raise self.failure
        return self

    def _write(self) -> None:
        for saving in self._savings.values():
            try:
                saving.wait()
            except BaseException as error:  # only the first is reported
                self.failure = self.failure or error
        if self.failure is not None or self._body is None:
            return
        try:
            write_header(self.path, self._body, self.names)
        except BaseException as error:
            self.failure = error
            return
        self.confirmed()

    def confirmed(self) -> None:
        """Remove what the header, which is on disk, no longer names."""
        for saving in self._savings.values():
            try:
                folder.retain(saving.folder, saving.number, 1, saving.number, saving.start)
            except OSError as error:  # the checkpoint is whole without this
                log.warning("could not look for what is not needed any more in %s: %s", saving.folder, why(error))


def header_of(step: int, left: Mapping[str, tuple[str, int | None]], also: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header of a checkpoint, without the names of its variants' checkpoints.

    **Arguments**

    - `step`: the step of the sweep.
    - `left`: why each variant left, and at which step.
    - `also`: facts to keep in the header.
    """
    return {
        "format": FORMAT,
        "format_version": _VERSION,
        "skirl": skirl_version(),
        "step": step,
        "left": {name: why for name, (why, _) in left.items()},
        "left_at": {name: at for name, (_, at) in left.items()},
        "generator": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        "also": dict(also),
    }


def write_header(path: Path, body: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Write the header, which makes a checkpoint count.

    **Arguments**

    - `path`: the folder.
    - `body`: what `header_of` returned.
    - `names`: the checkpoint of each variant.
    """
    try:
        write_sealed(path / HEADER, {**body, "variants": dict(names)}, f"{body['step']:016x}")
    except BaseException as error:
        raise not_written(path, error) from error


def not_written(path: Path, error: BaseException) -> BaseException:
    """Return the error to raise when the header could not be written: a `NotWritten` with advice if the system refused."""
    found = of_system(error)
    if found is None:
        return error
    told = NotWritten(
        f"{path} got no new checkpoint, {why(error, path)}; the one before stays whole: make it a folder that can be "
        "written to, with some room, and save again",
        found.errno,
    )
    told.__cause__ = error
    return told


def save_all(
    path: Path, variants: Sequence[Contender], data: Lookahead | None, parts: Parts, also: Mapping[str, Any] | None
) -> SweepSaving:
    """Save every variant still in the race, then the header. Until the header is written, the previous checkpoint counts.

    When this returns, rows are frozen and everything else is copied. Threads write the files, one for each variant.

    **Arguments**

    - `path`: the folder, which has a folder for each variant.
    - `variants`: all that have begun.
    - `data`: the lookahead.
    - `parts`: what else is saved of a variant.
    - `also`: facts to keep in the header; None if somebody else writes the header.
    """
    savings: dict[str, Saving] = {}
    step = 0 if data is None else data.step
    left = {one.name: (one.left, one.left_at) for one in variants if one.left is not None}
    body = None if also is None else header_of(step, left, also)
    for contender in variants:
        if contender.left is None:
            savings[contender.name] = save_one(path, contender, data, parts, wait=False)
    return SweepSaving(path, step, savings, body)


def save_one(path: Path, contender: Contender, data: Lookahead | None, parts: Parts, *, wait: bool) -> Saving:
    """Save one variant. The header names it later, if at all: until then, the checkpoint that it names stays.

    **Arguments**

    - `path`: the folder, which has a folder for each variant.
    - `contender`: the variant.
    - `data`: the lookahead.
    - `parts`: what else is saved of a variant.
    - `wait`: whether to return only when it is on disk.
    """
    with contender.drawing():
        return save(path / contender.name, model=contender.model, optimizers=parts(contender), data=data, wait=wait)


def read_header(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Read the header of a sweep's checkpoint. Raise if it is of another sweep.

    **Arguments**

    - `path`: the folder.
    - `names`: names of the variants that are to go on.
    """
    header = header_at(path)
    there = {*header["variants"], *header["left"]}
    if strange := sorted(there.symmetric_difference(names)):
        has = "has" if strange[0] in there else "has no"
        raise CheckpointError(
            f"{path / HEADER} is of another sweep: it {has} variant {strange[0]!r}. Make the sweep of the variants "
            f"{', '.join(sorted(there))}"
        )
    for name, own in header["variants"].items():
        _refuse_gone_on(path / name, folder.number_of(Path(own)), header["step"])
    return header


def _refuse_gone_on(path: Path, number: int, step: int) -> None:
    """Raise if a variant has gone on alone. Newer checkpoints of the sweep itself are of a kill, and do not count."""
    newer = [(at, of) for at, of in headers_with_steps(path) if folder.number_of(of) > number]
    alone = [(at, of.name) for at, of in newer if not folder.read(path / of.name).get("of_sweep")]
    if alone:
        raise CheckpointError(
            f"variant {path.name} has gone on alone to step {alone[0][0]:,}, and the sweep would go on from step {step:,} "
            f"and remove that: go on alone, or keep a copy of {path} elsewhere and remove "
            f"{' and '.join(name for _, name in reversed(alone))} from it"
        )


def header_at(path: Path, versions: tuple[int, ...] = _READ) -> dict[str, Any]:
    """Return the header in a folder of a sweep's checkpoints, of one of some versions."""
    if not (path / HEADER).is_file():
        raise CheckpointError(f"{path} holds no checkpoint of a sweep: give a folder that sweep.save has written")
    return read_sealed(path / HEADER, format=FORMAT, version=versions, what="checkpoint of a sweep")


def forget(path: Path) -> None:
    """Remove the header of a sweep that failed before its first batch, so that nothing resumes from it.

    **Arguments**

    - `path`: the folder.
    """
    with suppress(OSError):
        (path / HEADER).unlink()


def saved_with(path: Path) -> dict[str, Any]:
    """Return the facts that a sweep's checkpoint keeps besides its variants. Raise if the sweep cannot go on from them.

    **Arguments**

    - `path`: the folder.
    """
    try:
        return header_at(path, (_VERSION,))["also"]
    except OtherVersion as error:
        raise OtherVersion(f"{error}, or begin another sweep in another --save") from None


def of_one(path: Path, name: str) -> Path:
    """Return the path of the header of a variant's checkpoint, as `skirl.load` takes it.

    **Arguments**

    - `path`: the folder of the sweep, or of its checkpoints.
    - `name`: the variant. If it left before the sweep was last saved, its own last checkpoint is taken, if it is of the
      step at which it left.
    """
    saves = _saves_of(path)
    header = header_at(saves)
    if name in header["variants"]:
        return saves / name / header["variants"][name]
    names = [*header["variants"], *header["left"]]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        raise CheckpointError(
            f"{saves / HEADER} has no variant {name!r}: "
            + (f"did you mean {near[0]}?" if near else f"name one of {', '.join(names)}")
        )
    why, step, saved = header["left"][name], header.get("left_at", {}).get(name), headers_with_steps(saves / name)
    if not saved:
        raise CheckpointError(f"variant {name} has left ({why}) before it was saved: set --save-every lower")
    if step is not None and saved[0][0] < step:
        raise CheckpointError(
            f"variant {name} left at step {step:,} ({why}), and its last checkpoint is of step {saved[0][0]:,}: name "
            f"{saves / name} if you want that one, or set --save-every lower"
        )
    return saved[0][1]


def refuse_whole(path: Path) -> None:
    """Raise if a path is the folder of a sweep or of its checkpoints, where one variant's is asked for.

    **Arguments**

    - `path`: the path that was given.
    """
    if (path / HEADER).is_file() or (path / SWEEP).is_file():
        header = header_at(_saves_of(path))
        names = ", ".join([*header["variants"], *header["left"]])
        raise CheckpointError(f"{path} is of a sweep: add --variant and the name of one of its variants, {names}")


def _saves_of(path: Path) -> Path:
    """Return the folder of a sweep's checkpoints. path: that folder, or the one of its runs."""
    if not (path / HEADER).is_file() and (path / SWEEP).is_file():
        try:
            saved = json.loads((path / SWEEP).read_bytes())["flags"]["save"]
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{path / SWEEP} is damaged: name the folder that the sweep was saved to") from None
        if saved is None:
            raise CheckpointError(f"the sweep in {path} was never saved: train it again with --save")
        return Path(saved)
    return path


def load_all(
    path: Path, header: Mapping[str, Any], variants: Sequence[Contender], data: Lookahead | None, parts: Parts
) -> None:
    """Load every variant that was in the race, and the random generator of torch.

    **Arguments**

    - `path`: the folder.
    - `header`: the checkpoint's header.
    - `variants`: those that were in the race.
    - `data`: the lookahead.
    - `parts`: returns what else was saved of a variant.
    """
    for contender in variants:
        with contender.drawing():
            load(
                path / contender.name / header["variants"][contender.name], model=contender.model,
                optimizers=parts(contender), data=data,
            )  # fmt: skip
    state = np.frombuffer(base64.b64decode(header["generator"]), np.uint8)
    torch.set_rng_state(torch.from_numpy(state.copy()))
