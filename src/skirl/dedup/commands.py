"""The commands of this room: their flags, and what they print. What they do is imported when they run."""

import time
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any, Literal

from skirl.data.flags import DataFlags
from skirl.tools.machine import machine, peak_bytes
from skirl.tools.progress import clock, size


@dataclass(frozen=True)
class Same:
    """Flags of `skirl same`."""

    data: str
    """Files, as for `skirl convert`."""
    as_: str
    """The files to compare them with."""
    _: KW_ONLY
    schema: str | None = None
    """A TOML file that names the columns of data; criteo:, avazu: and mind: have one built in, converted files have theirs."""
    as_schema: str | None = None
    """The same of those to compare with."""
    workers: int = 0
    """Processes that read files; 0: this one does."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What to do with a malformed row: refuse, or leave the row out."""
    json: bool = False
    """Print the results as one line of JSON."""
    quiet: bool = False
    """Show no progress."""

    def run(self) -> dict[str, Any]:
        """Read both, compare their sums."""
        from skirl.dedup.same import same

        started = time.monotonic()
        sides = [
            DataFlags(data, schema=schema, workers=self.workers, bad_rows=self.bad_rows).files()
            for data, schema in ((self.data, self.schema), (self.as_, self.as_schema))
        ]
        found = same(*sides, json=self.json, quiet=self.quiet)
        took = {"seconds": time.monotonic() - started, "peak_bytes": peak_bytes(), "machine": machine()}
        return {"command": "same", **asdict(self), **found, **took}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """The result as people read it."""
        return {
            "samples": f"{result['samples']:,} and {result['samples_as']:,} in {clock(result['seconds'])}",
            "compared": ", ".join(result["compared"]),
            "same": "yes, whatever the order" if result["same"] else "no",
            "memory": f"{size(result['peak_bytes'])} at its peak, the whole process",
        }
