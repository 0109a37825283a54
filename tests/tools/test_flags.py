"""Flags of nested dataclasses, seen as one flat list."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from skirl.tools.flags import Composed, flags_of


@dataclass(frozen=True)
class Inner:
    group: ClassVar[str] = "inside"
    size: int = 1
    """How
    large."""
    name: str = "inner"
    """Of the part."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError("size is too small")


@dataclass(frozen=True)
class Outer(Composed):
    defaults: ClassVar[Mapping[str, Any]] = {"size": 5}
    path: Path
    """Where."""
    inner: Inner = field(default_factory=Inner)
    name: str = "outer"
    """Of the whole."""


def test_flags_come_in_order_with_their_groups_defaults_and_texts():
    found = [(flag.name, flag.default, flag.help, flag.group) for flag in flags_of(Outer).values()]
    assert found == [
        ("path", MISSING, "Where.", ""),
        ("size", 5, "How large.", "inside"),
        ("name", "outer", "Of the whole.", ""),
    ]


def test_flat_flags_reach_their_parts_and_come_back():
    made = Outer.of(path=Path("x"), name="n")
    assert made == Outer(Path("x"), Inner(size=5), "n")  # a name given to the whole is not passed to the part
    assert made.flat() == {"path": "x", "size": 5, "name": "n"}
    assert Outer.of(**{**made.flat(), "path": Path("x")}) == made


def test_a_part_checks_itself():
    with pytest.raises(ValueError, match="size is too small"):
        Outer.of(path=Path("x"), size=0)
