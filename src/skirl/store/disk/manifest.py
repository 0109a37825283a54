"""What a disk store holds at a durable point: which segments and how much of each, in one small file, replaced whole."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skirl.store.base import DISK_ROWS, Layout
from skirl.store.disk.segment import FORMAT_VERSION, SegmentEntry, Unusable
from skirl.tools.sealed_json import CheckpointError, read_sealed, seal, skirl_version
from skirl.tools.shape_of import TEXT, misfit

NAME = "store.json"
FORMAT = "skirl-disk-store"


@dataclass(frozen=True)
class Manifest:
    """The rows of all kinds, at one point."""

    identity: str
    generation: int
    layout: Layout
    segments: list[SegmentEntry]
    """In order of the log, kind by kind."""
    rows: tuple[int, ...] = ()
    """How many rows of each kind there are; empty where that is not known. Only a hint: it makes opening faster."""
    about: dict[str, str] = field(default_factory=dict)
    """By table: what its rows begin from: an initialiser and its seed, or the digest of an array."""

    def facts(self) -> dict[str, Any]:
        """For `from_facts`, in anything that JSON can say."""
        return {
            "kind": DISK_ROWS,
            "segment_format": FORMAT_VERSION,
            "identity": self.identity,
            "generation": self.generation,
            "layout": self.layout.facts(),
            "segments": [entry.to_text() for entry in self.segments],
            "rows": list(self.rows),
        } | ({"begun": self.about} if self.about else {})

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> "Manifest":
        """An Unusable where `facts` are not those of rows on disk."""
        try:
            if facts["kind"] != DISK_ROWS or facts["segment_format"] != FORMAT_VERSION:
                raise Unusable(f"is of {facts['kind']!r} in format {facts['segment_format']}")
            layout = Layout.from_facts(facts["layout"])
            segments = [SegmentEntry.from_text(entry) for entry in facts["segments"]]
            if not isinstance(facts["identity"], str) or not isinstance(facts["generation"], int):
                raise TypeError("identity and generation")
            if {entry.record for entry in segments} - set(layout.kinds):
                raise ValueError("a segment of no table")
            rows = tuple(int(n) for n in facts.get("rows", []))
            if misfit(about := facts.get("begun", {}), {...: TEXT}):
                raise TypeError("begun")
            return cls(facts["identity"], facts["generation"], layout, segments, rows, about)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Unusable(f"does not describe rows ({error!r})") from None

    def sealed(self) -> bytes:
        """The text of a store's own manifest."""
        head = {"format": FORMAT, "format_version": FORMAT_VERSION, "skirl": skirl_version()}
        return seal(head | {"facts": self.facts()})

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """A store's own manifest; an Unusable where it is not whole."""
        try:
            body = read_sealed(path, format=FORMAT, version=FORMAT_VERSION, what="disk store")
        except CheckpointError as error:
            text, _, advice = str(error).rpartition(": ")
            raise Unusable(text, advice if "version" in advice else "") from None
        try:
            return cls.from_facts(body.get("facts", {}))
        except Unusable as error:
            raise Unusable(f"{path} {error}") from None
