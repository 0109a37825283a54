"""The manifest: which segments a disk store holds at a durable point, and how much of each. It is replaced as a whole."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skirl.store.base import Layout
from skirl.store.disk.os_files import Unusable
from skirl.store.disk.segment import FORMAT_VERSION, SegmentEntry
from skirl.tools.sealed_json import TEXT, CheckpointError, misfit, read_sealed, seal, skirl_version

NAME = "store.json"
FORMAT = "skirl-disk-store"


@dataclass(frozen=True)
class Manifest:
    """The segments that hold a store's rows at one durable point or in one frozen state."""

    identity: str
    generation: int
    layout: Layout
    segments: list[SegmentEntry]
    """The segments kind by kind, in the order of each log."""
    rows: tuple[int, ...] = ()
    """Number of rows of each kind; empty if unknown. Only a hint, which makes opening faster."""
    about: dict[str, str] = field(default_factory=dict)
    """The start values of each table's rows: an initialiser and its seed, or the digest of an array."""

    def facts(self) -> dict[str, Any]:
        """Return the manifest in a form that JSON can hold, for `from_facts`."""
        return {
            "segment_format": FORMAT_VERSION,
            "identity": self.identity,
            "generation": self.generation,
            "layout": self.layout.facts(),
            "segments": [entry.to_text() for entry in self.segments],
            "rows": list(self.rows),
        } | ({"begun": self.about} if self.about else {})

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> "Manifest":
        """Return the manifest that `facts` describe. Raise an Unusable if they describe none."""
        try:
            if facts["segment_format"] != FORMAT_VERSION:
                raise Unusable(f"has rows in format {facts['segment_format']}")
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
        """Return the content of a store's manifest file."""
        head = {"format": FORMAT, "format_version": FORMAT_VERSION, "skirl": skirl_version()}
        return seal(head | {"facts": self.facts()})

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read a store's manifest file. Raise an Unusable if it is damaged."""
        try:
            body = read_sealed(path, format=FORMAT, version=FORMAT_VERSION, what="disk store")
        except CheckpointError as error:
            text, _, advice = str(error).rpartition(": ")
            raise Unusable(text, advice if "version" in advice else "") from None
        try:
            return cls.from_facts(body.get("facts", {}))
        except Unusable as error:
            raise Unusable(f"{path} {error}") from None
