"""Writes files by session in this process: spills each load of rows sorted, then writes stretches that fit in memory."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pyarrow as pa

from skirl.data.files.stream import Files
from skirl.dedup.finish import WrittenColumns, finish, keys_of, measured
from skirl.dedup.frames import KEY_BYTES, ordered, packing_of
from skirl.dedup.order import SessionStarts, partitions_of
from skirl.dedup.plan import Counts, highs_of, part_of
from skirl.dedup.spill import ALL, ROWS, SESSIONS, Spill, Spilled
from skirl.dedup.stretch import Stretch
from skirl.dedup.wanted import Wanted, loads
from skirl.tools.os_errors import writing
from skirl.tools.progress import Progress
from skirl.tools.sealed_json import sync_folder
from skirl.tools.units import parse_seconds


class Local:
    """The engine that runs in this process. It reads everything once, in order. `convert_by_session` calls it."""

    def spill(
        self, files: Files, shape: WrittenColumns, wanted: Wanted, work: Path, progress: Progress
    ) -> dict[str, Any]:
        """Spill rows to disk. Return counts of what they hold, and the plan of the files to write.

        **Arguments**

        - `files`: the rows.
        - `shape`: what to write.
        - `wanted`: how to write it.
        - `work`: the command's working folder.
        - `progress`: called with the number of rows.
        """
        folder = work / "spill"
        shutil.rmtree(folder, ignore_errors=True)
        with writing(folder):
            folder.mkdir()
        seconds = parse_seconds(wanted.partition) if wanted.partition else None
        counts, samples, schema = Counts(), 0, None
        with ExitStack() as stack:
            # Sessions are counted across partitions, so if there are any, keys are spilled a second time without them.
            names = (ROWS, SESSIONS) if seconds else (ROWS,)
            spills = {name: stack.enter_context(Spill(folder, name)) for name in names}
            for table in loads(files, shape, wanted.load):
                schema = table.schema
                rows = ordered(table, partitions_of(keys_of(table)[1], seconds))
                counts.hold(rows.partitions, rows.high, 1, rows.sizes)
                spills[ROWS].add(rows, wanted.frame)
                if seconds:
                    spills[SESSIONS].add(rows.alone(), wanted.frame)
                samples += len(table)
                facts = {"rows": f"{samples:,}"}
                progress(samples, lambda facts=facts: facts)
                del table, rows
                pa.default_memory_pool().release_unused()  # the pool would keep what a load needed while the next is read
            if schema is None:
                raise ValueError(
                    f"{files.dataset.paths[0]}: there are no rows to write: set data to files that have some"
                )
            told = {name: spill.close() for name, spill in spills.items()}
        sync_folder(folder)
        found: dict[str, Any] = {
            "samples": samples, "spilled": told[ROWS],
            "spilled_bytes": sum(of["bytes"] + KEY_BYTES * of["rows"] for of in told.values()),
            "rows_schema": schema.serialize().to_pybytes().hex(),
            "bad_rows_skipped": files.bad_rows, "first_bad_row": files.first_bad_row,
        }  # fmt: skip
        found |= self._counted(work, told, shape, seconds, wanted.unit) | counts.planned(wanted.unit)
        with closing(_spilled(work, found["spilled"])) as spilled:
            return found | measured(_unit(spilled, found, 0), shape, work, wanted.unit)

    def _counted(
        self, work: Path, told: Mapping[str, Any], shape: WrittenColumns, seconds: float | None, most: int
    ) -> dict[str, int]:
        """Count sessions. Reads only sort keys."""
        name = SESSIONS if seconds else ROWS
        with closing(_spilled(work, told[name], name)) as spilled:
            found = sessions_in(Stretch(spilled, None, ALL, None, most), shape, seconds)
        if seconds:
            for path in (work / "spill").glob(f"{name}*"):
                path.unlink()
        return found

    def finish(self, work: Path, shape: WrittenColumns, manifest: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
        """Write the files that do not exist yet. After each file, yield the number of files done and of their rows.

        **Arguments**

        - `work`: the command's working folder.
        - `shape`: what to write.
        - `manifest`: what `spill` returned.
        """
        done = 0
        with closing(_spilled(work, manifest["spilled"])) as spilled:
            for number, rows in enumerate(manifest["unit_rows"]):
                path = part_of(work / "parts", number, manifest)
                if not path.is_file():
                    finish(_unit(spilled, manifest, number), number, path, path.with_suffix(".part"), shape, manifest)
                done += rows
                yield number + 1, done

    def __enter__(self) -> "Local":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def sessions_in(stretch: Stretch, shape: WrittenColumns, seconds: float | None) -> dict[str, int]:
    """Return the number of sessions, and of those cut for each reason.

    **Arguments**

    - `stretch`: all their rows, of every partition.
    - `shape`: what to write.
    - `seconds`: length of a partition; None if there is only one.
    """
    starts = SessionStarts(shape.gap)
    for piece in stretch.pieces():
        starts.begun(piece.hashes, piece.times, partitions_of(piece.times, seconds))
    return starts.counts


def _spilled(work: Path, told: Mapping[str, int], name: str = ROWS) -> Spilled:
    return Spilled(work / "spill", told, f"remove {work}, and run the command again", name)


def _unit(spilled: Spilled, manifest: Mapping[str, Any], number: int) -> Stretch:
    partition, first, end = manifest["units"][number]
    schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(manifest["rows_schema"])))
    highs = highs_of(first, end, manifest["buckets"])
    return Stretch(spilled, partition, highs, packing_of(schema), manifest["most"], manifest["unit_bytes"][number])
