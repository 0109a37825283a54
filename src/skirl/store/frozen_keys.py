"""Read only the keys of frozen rows, which takes a small part of what reading the rows would."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from skirl.store.base import DISK_ROWS, Facts, Layout, Record
from skirl.store.disk.manifest import Manifest
from skirl.store.disk.records import HEADER
from skirl.store.memory.frozen import name_of
from skirl.tools.sealed_json import CheckpointError
from skirl.tools.tensor_file import TensorReader


def frozen_keys(folder: Path, facts: Facts) -> Iterator[tuple[Record, np.ndarray]]:
    """Yield the keys of all rows, in arrays, each with the record of its keys. A key may come more than once."""
    if facts.get("kind") == DISK_ROWS:
        manifest = Manifest.from_facts(facts)
        for entry in manifest.segments:
            yield entry.record, segment_keys(folder, entry.name, entry.count)
        return
    for entry in facts["files"]:
        reader = TensorReader(folder, entry)
        for record in Layout.from_facts(facts["layout"]).kinds:
            if (name := f"keys-{name_of(record)}") in reader.columns:
                yield record, reader.mapped(name)


def segment_keys(folder: Path, name: str, count: int) -> np.ndarray:
    """Read the keys of a segment of a disk store."""
    path = folder / f"{name}.keys"
    try:
        return np.fromfile(path, np.int64, count, offset=HEADER)
    except OSError:
        raise CheckpointError(f"{path} is missing: use another checkpoint, or copy the whole folder again") from None
