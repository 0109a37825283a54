"""The rule of the house: a room imports only from rooms on lower floors, and no two files import each other.

Imports inside functions and for types count like any other.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import quantiles

import pytest

import skirl

HOUSE = Path(skirl.__file__).parent
FLOORS = (
    ("tools",),
    ("core",),
    ("oracle", "store", "data", "models", "peers"),
    ("engine",),
    ("nn",),
    ("pipeline",),
    ("checkpoint",),
    ("train",),
    ("measure",),
    ("dedup", "placement", "sweep"),
    ("__init__", "cli", "torchrec", "lightning"),
    ("__main__",),
)
"""The floors, from the ground up."""

FILES = sorted(path.relative_to(HOUSE) for path in HOUSE.rglob("*.py"))
MODULES = {".".join(("skirl", *path.with_suffix("").parts)).removesuffix(".__init__"): path for path in FILES}


def floor_of(path: Path) -> int:
    """Return the floor of the room that a file is in."""
    room = path.parts[0].removesuffix(".py")
    return next(n for n, rooms in enumerate(FLOORS) if room in rooms)


@cache
def imports_of(path: Path) -> list[tuple[int, Path]]:
    """Return the line and the file of each skirl module that a file imports."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, Path]]:
    for node in ast.walk(ast.parse((HOUSE / path).read_text())):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names if alias.name.split(".")[0] == "skirl"]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports by dots: write the whole name"
            if (node.module or "").split(".")[0] != "skirl":
                continue
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in named:
            while name not in MODULES:
                name = name.rpartition(".")[0]
            if MODULES[name] != path:
                yield node.lineno, MODULES[name]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_room_imports_only_from_floors_below(path: Path):
    for line, target in imports_of(path):
        same_room = path.parts[0] == target.parts[0]
        assert same_room or floor_of(target) < floor_of(path), f"{path}:{line} imports {target}, which is not below it"


def test_the_reader_knows_no_engine():
    assert all(target.parts[0] != "engine" for _, target in imports_of(Path("pipeline/reader.py")))


def test_no_two_files_need_each_other():
    needs = {path: {target for _, target in imports_of(path)} for path in FILES}
    done: set[Path] = set()

    def walk(path: Path, way: tuple[Path, ...]) -> None:
        assert path not in way, " -> ".join(map(str, (*way[way.index(path) :], path)))
        if path not in done:
            for target in needs[path]:
                walk(target, (*way, path))
            done.add(path)

    for path in FILES:
        walk(path, ())


def test_the_house_is_small_enough_to_know():
    rooms = {path.parts[0] for path in FILES if len(path.parts) > 1}
    assert len(rooms) <= 16, sorted(rooms)
    assert max(len(path.parts) for path in FILES) - 1 <= 3
    lengths = {str(path): len((HOUSE / path).read_text().splitlines()) for path in FILES if path.name != "__init__.py"}
    longest = max(lengths, key=lambda name: lengths[name])
    assert lengths[longest] <= 480, f"{longest} has {lengths[longest]} lines"
    tenths = quantiles(lengths.values(), n=10)
    assert tenths[4] <= 150 and tenths[8] <= 330, tenths
