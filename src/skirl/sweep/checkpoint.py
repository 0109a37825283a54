"""A checkpoint of a sweep: one of each variant in the race, and a header that names those of one step."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from skirl.checkpoint import folder
from skirl.checkpoint.folder import OF_SWEEP as HEADER
from skirl.checkpoint.folder import headers_with_steps
from skirl.checkpoint.rows import FrozenCollection
from skirl.checkpoint.saving import told_of
from skirl.engine.engine import Engine
from skirl.engine.packs import Pack
from skirl.store.base import Frozen
from skirl.store.disk.frozen import check_files
from skirl.store.disk.manifest import Manifest, take_over
from skirl.store.disk.os_files import OsFiles
from skirl.sweep.variants import Varied
from skirl.tools import __version__
from skirl.tools.sealed_json import CheckpointError, put_whole, read_sealed, seal
from skirl.train.resume import FREE, check_flags

FORMAT = "skirl-sweep-checkpoint"
_VERSION = 10


def write_header(path: Path, step: int, **facts: Any) -> None:
    """Let checkpoints of a step count. facts: `variants`, the checkpoint of each; who has `left`; and `also`."""
    head = {"format": FORMAT, "format_version": _VERSION, "skirl": __version__, "step": step}
    generator = torch.get_rng_state().numpy().tobytes().hex()
    with told_of(path):
        put_whole(path / HEADER, seal({**head, "generator": generator, **facts}), f"{step:016x}")


def write_rows(engine: Engine, path: Path, before: dict[str, Any]) -> Callable[[Pack], Callable[..., Frozen]]:
    """Write the rows of all variants to the folder of one of them. Return what links them, as those of one variant, for a
    checkpoint of its own. `before`: what the last checkpoint has of the rows, by folder. It becomes what this one has."""
    rows = path / folder.ROWS
    known = before.get(str(path), {})
    before.clear()
    with told_of(path):
        rows.mkdir(parents=True, exist_ok=True)
        try:
            for of in ("store", "cache") if known else ():
                check_files(rows, known[of])
        except CheckpointError:  # a checkpoint failed meanwhile
            known = {}
        frozen = FrozenCollection(engine, path, known)
        try:
            facts = before[str(path)] = frozen.write()
        finally:
            frozen.release()

    def link(columns: list[list[int]], path: Path) -> dict[str, Any]:
        files = OsFiles()
        for of in ("store", "cache"):
            manifest = Manifest.from_facts(facts[of])
            for entries in (manifest.segments, manifest.resident or []):
                take_over(files, entries, rows, path / folder.ROWS, [])
        files.sync_folder(path / folder.ROWS)
        return {of: facts[of] | {"columns": columns} for of in ("store", "cache")}

    def rows_of(pack: Pack) -> Callable[..., Frozen]:
        columns = [[t, pack.begins[b], pack.held[b]] for b, bank in enumerate(pack.schema.banks) for t in bank.tables]
        return lambda engine, path, before: Frozen(partial(link, columns, path), lambda: None)

    return rows_of


def read_header(path: Path, names: Sequence[str]) -> dict[str, Any]:
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


def header_at(path: Path) -> dict[str, Any]:
    if not (path / HEADER).is_file():
        raise CheckpointError(f"{path} holds no checkpoint of a sweep: give a folder that sweep.save has written")
    return read_sealed(path / HEADER, format=FORMAT, version=_VERSION, what="checkpoint of a sweep")


MAY = (FREE - {"lr", "dense_lr"}) | {"vary", "variants", "processes"}
"""Flags that may differ from the checkpoint's. Variants are compared themselves. Learning rates may not change, because
losses from before and after the resume are summed."""


def check_same(saved: Mapping[str, Any], flags: Mapping[str, Any], variants: Sequence[Varied]) -> None:
    """Raise if flags, or those of a variant, differ from the saved ones."""
    then = "go on with that, or begin another sweep in another --save"
    check_flags(saved.get("flags", {}), plain(flags), may=MAY, then=then)
    for variant in variants:
        of = f"variant {variant.name} is another: {then}"
        check_flags(saved.get("recipes", {}).get(variant.name, {}), plain(variant.recipe.flat()), may=MAY, then=of)


def plain(value: Any) -> Any:
    """Return `value` as JSON that every reader takes: numbers that are not finite become null, paths become text."""
    return json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
