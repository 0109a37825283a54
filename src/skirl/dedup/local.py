"""Files by session in this process: rows go to buckets on disk, and stretches of buckets that fit in memory to files."""

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from skirl.data.files.stream import Files
from skirl.dedup.finish import Shape, Unit, finish, keys_of, measured
from skirl.dedup.order import buckets_of, partitions_of
from skirl.dedup.plan import Counts, buckets_for, part_of
from skirl.dedup.spill import Bucket, Spill, packing_of
from skirl.dedup.wanted import Wanted, loads
from skirl.tools.durations import parse_seconds
from skirl.tools.os_errors import writing
from skirl.tools.progress import Progress
from skirl.tools.sealed_json import sync_folder


class Local:
    """Reads everything once, in order; `convert_by_session` says when."""

    def spill(self, files: Files, shape: Shape, wanted: Wanted, work: Path, progress: Progress) -> dict[str, Any]:
        """Write rows to their buckets; what they hold, and which make a file each.

        **Arguments**

        - `files`: the rows.
        - `shape`: what is written of them.
        - `wanted`: how.
        - `work`: the folder of the command.
        - `progress`: told of rows.
        """
        folder = work / "spill"
        shutil.rmtree(folder, ignore_errors=True)
        with writing(folder):
            folder.mkdir()
        buckets = buckets_for(sum(os.stat(path).st_size for path in files.dataset.paths), wanted.unit)
        seconds = parse_seconds(wanted.partition) if wanted.partition else None
        spill, counts = Spill(folder, buckets), Counts()
        samples, schema = 0, None
        for table in loads(files, shape, wanted.load):
            schema = table.schema
            hashes, times = keys_of(table)
            for bucket, frame in spill.add(table, buckets_of(hashes, buckets), partitions_of(times, seconds)):
                counts.hold(frame.partition, bucket, frame.rows, frame.bytes)
            samples += len(table)
            facts = {"rows": f"{samples:,}", "buckets": f"{buckets:,}"}
            progress(samples, lambda facts=facts: facts)
        if schema is None:
            raise ValueError(f"{files.dataset.paths[0]}: there is no row to write: give more files")
        spill.close()
        sync_folder(folder)
        found: dict[str, Any] = {
            "samples": samples, "sizes": spill.sizes, "spilled_bytes": sum(spill.sizes),
            "rows_schema": schema.serialize().to_pybytes().hex(),
            "bad_rows_skipped": files.bad_rows, "first_bad_row": files.first_bad_row,
        }  # fmt: skip
        self._count(counts, work, shape, found)
        found |= counts.planned(buckets, wanted.unit)
        unit = _unit(work, found, 0)
        try:
            return found | measured(unit, shape, wanted.unit, work)
        finally:
            unit.close()

    def _count(self, counts: Counts, work: Path, shape: Shape, found: Mapping[str, Any]) -> None:
        """Count sessions: of each bucket only what rows are ordered by is read."""
        for number in range(len(found["sizes"])):
            bucket = _bucket(work, found, number)
            if bucket.frames:
                high, low, times, _ = map(np.concatenate, zip(*map(bucket.keys, bucket.frames)))
                partitions = np.repeat([f.partition for f in bucket.frames], [f.rows for f in bucket.frames])
                counts.add(np.stack([high, low], axis=1), times, partitions, shape.gap)
            bucket.close()

    def finish(self, work: Path, shape: Shape, manifest: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
        """Write the files that are not there yet; how many are, and their rows, after each.

        **Arguments**

        - `work`: the folder of the command.
        - `shape`: what is written.
        - `manifest`: what `spill` found.
        """
        done = 0
        for number, rows in enumerate(manifest["unit_rows"]):
            path = part_of(work / "parts", number, manifest)
            if not path.is_file():
                unit = _unit(work, manifest, number)
                try:
                    finish(unit, path, path.with_suffix(".part"), shape, manifest)
                finally:
                    unit.close()
            done += rows
            yield number + 1, done

    def __enter__(self) -> "Local":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _unit(work: Path, manifest: Mapping[str, Any], number: int) -> Unit:
    partition, first, end = manifest["units"][number]
    schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(manifest["rows_schema"])))
    buckets = [_bucket(work, manifest, bucket) for bucket in range(first, end)]
    return Unit(buckets, partition, packing_of(schema), manifest["most"])


def _bucket(work: Path, manifest: Mapping[str, Any], number: int) -> Bucket:
    return Bucket(work / "spill", number, manifest["sizes"][number], f"remove {work}, and run the command again")
