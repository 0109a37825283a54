"""Writes data files as a folder of Parquet files by session: sorts each load of rows, spills it, then writes the files."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skirl.data.files.stream import Files
from skirl.dedup.folders import check_outside, folders_of
from skirl.dedup.how_far import HowFar
from skirl.dedup.local import Local
from skirl.dedup.spark import Spark
from skirl.dedup.wanted import Wanted, shaped
from skirl.store.disk.os_files import NAME, Lock
from skirl.tools.flags import WrongFlags
from skirl.tools.os_errors import writing
from skirl.tools.progress import Progress
from skirl.tools.sealed_json import CheckpointError, read_sealed, skirl_version, sync_folder, write_sealed

FORMAT, VERSION = "skirl convert", 2
"""Those of the JSON files of an unfinished convert, which data/files/README.md describes."""
_TOLD = (
    "samples", "sessions", "cut_at_borders", "cut_as_too_long", "bad_rows_skipped", "first_bad_row", "groups",
    "spilled_bytes",
)  # fmt: skip


def convert_by_session(
    files: Files, out: str, wanted: Wanted, engine: Local | Spark | None = None, *, force: bool, json: bool, quiet: bool
) -> dict[str, Any]:
    """Write the folder, resuming an interrupted command, and return the result.

    **Arguments**

    - `files`: the rows.
    - `out`: the folder to write; it appears only when complete.
    - `wanted`: how to write it.
    - `engine`: what moves the rows; None for this process. The files are the same with any engine.
    - `force`: replace an existing folder.
    - `json`: show progress on stderr, since the result goes to stdout.
    - `quiet`: show no progress.
    """
    files, shape = shaped(files, wanted)
    check_outside(files.dataset.paths, out)
    folder, work = folders_of(out)
    to = sys.stderr if json else sys.stdout
    with _alone(folder, work, force):
        of = _identity(files, wanted, engine := engine or Local())
        manifest = _read(work, of)
        if manifest is None:
            shutil.rmtree(work / "parts", ignore_errors=True)
            with writing(work):
                (work / "parts").mkdir()
        with engine:
            if manifest is None:
                here = isinstance(engine, Local)
                with HowFar("convert", files, here=here, to=to, quiet=quiet) as progress:
                    manifest = _noted(engine.spill(files, shape, wanted, work, progress), work)
            units = manifest["units"]
            with Progress("write", steps=len(units), to=to, quiet=quiet) as progress:
                for number, rows in engine.finish(work, shape, manifest):
                    facts = {"rows": f"{rows:,} of {manifest['samples']:,}", "buckets": f"{number:,} of {len(units):,}"}
                    progress(number, lambda facts=facts: facts)
        sync_folder(work / "parts")
        _put_in_place(work, folder, force)
        shutil.rmtree(work, ignore_errors=True)
    parts = sorted(folder.iterdir())
    return {name: manifest[name] for name in _TOLD} | {
        "files": len(parts),
        "bytes": sum(part.stat().st_size for part in parts),
    }


@contextmanager
def _alone(folder: Path, work: Path, force: bool) -> Iterator[None]:
    """Lock the command's working folder for this process. Clean up after a command that ended between putting its files in
    place and removing the working folder."""
    is_there = f"out is {folder}, which already exists: name another folder, or add --force to replace it"
    if folder.exists() and not force and not work.exists():
        raise WrongFlags(is_there)
    lock = _locked(work)
    try:
        if (work / "begun.json").is_file() and not (work / "parts").exists():
            for left in work.iterdir():
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                elif left.name != NAME:
                    left.unlink()
        if folder.exists() and not force:
            if not (work / "parts").exists():
                with suppress(OSError):  # the folder holds other files
                    (work / NAME).unlink()
                    work.rmdir()
            raise WrongFlags(is_there)
        yield
    finally:
        lock.release()


def _locked(work: Path) -> Lock:
    while True:
        with writing(work):
            work.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # the process that held the folder has just removed it
            lock = Lock(work)
            if lock.is_there:
                return lock
            lock.release()


def _identity(files: Files, wanted: Wanted, engine: Local | Spark) -> dict[str, Any]:
    stats = [(path, os.stat(path)) for path in files.dataset.paths]
    return asdict(wanted) | {
        "engine": type(engine).__name__.lower(),
        "files": [f"{path} ({stat.st_size} bytes, {stat.st_mtime_ns})" for path, stat in stats],
        "schema": files.encoder.schema.toml(),
        "ids": f"{files.encoder.rows_of.described} {dict(files.encoder.rows) if wanted.as_rows else ''}",
        "bad_rows": "skip" if files.encoder.skip else "refuse",
        "skirl": skirl_version(),
    }


def _read(work: Path, of: dict[str, Any]) -> dict[str, Any] | None:
    """Return the manifest of an earlier command's spill, or None if there is none. Raise if that command was different."""
    begun, path = work / "begun.json", work / "spilled.json"
    then = f"run the command as it was, or remove {work} to start over"
    if begun.is_file():
        try:
            was = read_sealed(begun, format=FORMAT, version=VERSION, what="convert")["of"]
        except CheckpointError:
            raise ValueError(f"{begun} is damaged: remove {work}, and run the command again") from None
        for name, value in of.items():
            if was.get(name) != value:
                raise ValueError(f"{work} is of a convert with {_differs(name, was.get(name), value)}: {then}")
        if path.is_file():
            try:
                return read_sealed(path, format=FORMAT, version=VERSION, what="convert")
            except CheckpointError:
                raise ValueError(f"{path} is damaged: remove {work}, and run the command again") from None
    else:
        write_sealed(begun, {"format": FORMAT, "format_version": VERSION, "skirl": skirl_version(), "of": of}, "begun")
    return None


def _differs(name: str, was: Any, now: Any) -> str:
    if name == "files" and isinstance(was, list):
        mine = next((f for f in now if f not in was), None)
        gone = next((f for f in was if f not in now), None)
        return f"other files ({gone or 'without ' + str(mine)}, not {mine or 'without it'})"
    return "another schema" if name == "schema" else f"{name.replace('_', '-')} {was}, not {now}"


def _noted(manifest: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """Write the manifest: what has been spilled, and the files to make from it. Return it."""
    body = {"format": FORMAT, "format_version": VERSION, "skirl": skirl_version(), **manifest}
    write_sealed(work / "spilled.json", body, "spilled")
    return body


def _put_in_place(work: Path, out: Path, force: bool) -> None:
    """Move the finished folder to `out`, atomically."""
    with writing(out):
        if out.exists() and force:
            os.rename(out, work / "replaced")
        os.rename(work / "parts", out)
        sync_folder(out.absolute().parent)
