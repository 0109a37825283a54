"""A checkpoint of a sweep: one of each variant still in the race, and a header that names those that belong together."""

import base64
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skirl.checkpoint.load_run import load
from skirl.checkpoint.save_run import save
from skirl.pipeline.lookahead import Lookahead
from skirl.sweep.contender import Contender
from skirl.tools.sealed_json import CheckpointError, read_sealed, skirl_version, write_sealed

HEADER = "sweep-checkpoint.json"
FORMAT = "skirl-sweep-checkpoint"
_VERSION = 1
_KEPT = 2
"""Checkpoints of a variant: the header names the one before until those of all variants are on disk."""

Parts = Callable[[Contender], Sequence[Any]]


def optimizers_of(contender: Contender) -> list[Any]:
    """What is saved of a variant beside its model and rows.

    **Arguments**

    - `contender`: the variant.
    """
    return [] if contender.dense is None else [contender.dense]


def save_all(
    path: Path, variants: Sequence[Contender], data: Lookahead | None, parts: Parts, also: Mapping[str, Any]
) -> None:
    """Save every variant that is in the race, then the header: until it is there the one before counts, of all.

    **Arguments**

    - `path`: the folder; each variant has one of its name in it.
    - `variants`: all that have begun.
    - `data`: the lookahead.
    - `parts`: what else is saved of a variant.
    - `also`: what comes back with the header.
    """
    saved, step = {}, 0 if data is None else data.step
    for contender in variants:
        if contender.left is None:
            with contender.drawing():
                saving = save(
                    path / contender.name, model=contender.model, optimizers=parts(contender), data=data, keep=_KEPT
                )
            saved[contender.name] = saving.path.name
    generator = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
    body = {
        "format": FORMAT,
        "format_version": _VERSION,
        "skirl": skirl_version(),
        "step": step,
        "variants": saved,
        "left": {contender.name: contender.left for contender in variants if contender.left is not None},
        "generator": generator,
        "also": dict(also),
    }
    write_sealed(path / HEADER, body, f"{step:016x}")


def read_header(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """The header of a sweep's checkpoint; that of another sweep is refused.

    **Arguments**

    - `path`: the folder.
    - `names`: of the variants that are to go on.
    """
    if not (path / HEADER).is_file():
        raise CheckpointError(f"{path} holds no checkpoint of a sweep: give a folder that sweep.save has written")
    header = read_sealed(path / HEADER, format=FORMAT, version=_VERSION, what="checkpoint of a sweep")
    there = {*header["variants"], *header["left"]}
    if strange := sorted(there.symmetric_difference(names)):
        has = "has" if strange[0] in there else "has no"
        raise CheckpointError(
            f"{path / HEADER} is of another sweep: it {has} variant {strange[0]!r}. Make the sweep of the variants "
            f"{', '.join(sorted(there))}"
        )
    return header


def load_all(
    path: Path, header: Mapping[str, Any], variants: Sequence[Contender], data: Lookahead | None, parts: Parts
) -> None:
    """Load every variant that was in the race.

    **Arguments**

    - `path`: the folder.
    - `header`: of the checkpoint.
    - `variants`: those that were in the race.
    - `data`: the lookahead.
    - `parts`: what else was saved of a variant.
    """
    for contender in variants:
        with contender.drawing():
            load(
                path / contender.name / header["variants"][contender.name], model=contender.model,
                optimizers=parts(contender), data=data,
            )  # fmt: skip
    state = np.frombuffer(base64.b64decode(header["generator"]), np.uint8)
    torch.set_rng_state(torch.from_numpy(state.copy()))
