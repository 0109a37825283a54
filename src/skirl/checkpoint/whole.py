"""Check that the files of frozen rows are undamaged, whichever kind of store froze them, before anything changes.

For segments of a disk store only sizes are checked here: `thaw` checks each record before the store changes.
"""

from pathlib import Path

from skirl.store.base import DISK_ROWS, Facts
from skirl.store.disk import links
from skirl.store.disk.manifest import Manifest
from skirl.store.disk.os_files import Unusable
from skirl.tools.sealed_json import CheckpointError
from skirl.tools.tensor_file import TensorReader


def check(folder: Path, facts: Facts) -> None:
    """Raise a CheckpointError that names a file that is not as it was written."""
    if facts.get("kind") == DISK_ROWS:
        try:
            manifest = Manifest.from_facts(facts)
        except Unusable as error:
            raise CheckpointError(f"{folder} {error}: use another checkpoint") from None
        for entry in manifest.segments:
            links.check_sizes(folder, entry.files())
        return
    for entry in facts["files"]:
        TensorReader(folder, entry).check()
