"""Progress of a command in reading its files: in rows if the files know their number, else in bytes of text."""

import os
from collections.abc import Callable
from typing import Any

from skirl.data.files.find import kind_of
from skirl.data.files.stream import Files
from skirl.tools.progress import Facts, Progress, size


class HowFar(Progress):
    """Progress over the rows of files. Call it with the number of rows read so far.

    **Arguments**

    - `title`: title of the command.
    - `files`: the files to read.
    - `here`: the rows are read through `Files.pieces` of this very object, the only one to know its position in text.
    - `shown`: further arguments of `Progress`.
    """

    def __init__(self, title: str, files: Files, *, here: bool, **shown: Any) -> None:
        self._files, self._sizes = files, [os.stat(path).st_size for path in files.dataset.paths]
        self._kinds = [kind_of(path) for path in files.dataset.paths]
        in_rows = all(kind in ("parquet", "arrow") for kind in self._kinds)
        self._in_bytes = here and not in_rows
        if self._in_bytes:
            super().__init__(title, steps=sum(self._sizes), written=size, **shown)
        else:
            super().__init__(title, steps=files.dataset.anew().count() if in_rows else None, **shown)

    def __call__(self, done: int, facts: Callable[[], Facts]) -> None:
        """Report that `done` rows have been read."""
        super().__call__(self._bytes() if self._in_bytes else done, facts)

    def _bytes(self) -> int:
        """Return the bytes read so far: those of finished files, and those of the current one if it is plain text."""
        if (part := self._files.reached) is None:
            return 0
        here = 0 if self._kinds[part.file] != "text" else (part.part + 1) * self._files.dataset.part_bytes
        return sum(self._sizes[: part.file]) + min(here, self._sizes[part.file])
