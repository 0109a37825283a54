"""The way of a batch and the classes that it meets, as docs/design.md tells them."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import skirl

ROOT = Path(__file__).parents[1]
PACKAGE = Path(skirl.__file__).parent
ROOMS = ("core", "oracle", "engine", "nn", "pipeline", "store")
KEY = 777


def section(name: str) -> str:
    page = (ROOT / "docs" / "design.md").read_text()
    found = re.search(rf"^## {name}\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    assert found
    return found[1]


def stops() -> list[tuple[str, str, str]]:
    found = re.findall(r"^\| (\d+) \| `(\w+)\.(\w+)` \| ([\w/.]+) \|", section("The way of a batch"), re.MULTILINE)
    assert [int(number) for number, *_ in found] == list(range(1, len(found) + 1))
    return [stop[1:] for stop in found]


def has(file: str, owner: str, function: str) -> bool:
    tree = ast.parse((PACKAGE / file).read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
    assert classes, f"{file} has no {owner}"
    return function in {node.name for node in classes[0].body if isinstance(node, ast.FunctionDef)}


def arrays(value: Any, seen: set[int]) -> Iterator[np.ndarray]:
    """Yield the arrays of whole numbers in an argument or a result, however deep."""
    if id(value) in seen or value is None or isinstance(value, str | int | float):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "i":
            yield value
        return
    if isinstance(value, list | tuple):
        parts = list(value)
    elif type(value).__name__ in ("Ids", "Work", "Step", "KeyedJagged", "BankIds"):
        names = getattr(type(value), "__slots__", None) or vars(value)
        parts = [getattr(value, name) for name in names if name not in ("batch", "evict_keys") and hasattr(value, name)]
    else:
        return
    for part in parts:
        yield from arrays(part, seen)


def test_a_real_id_makes_every_stop_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row has left the cache before; in this pass it is fetched, trained, and leaves again."""
    way = [function for _, function, _ in stops()]
    table = skirl.Table("item", 1000, 2)
    embeddings = skirl.EmbeddingBagCollection([table], optimizer=skirl.SGD(lr=0.1), cache=1)

    def train(ids: list[int]) -> None:
        loader = [skirl.KeyedJagged.one_hot(["item"], torch.tensor([[one]])) for one in ids]
        with skirl.lookahead(loader, embeddings, sparse=lambda batch: batch) as batches:
            for batch in batches:
                embeddings(batch)["item"].sum().backward()

    train([KEY, 500])
    passed, calls = list[tuple[int, str]](), count()
    for owner, function, file in stops():
        kind = getattr(import_module("skirl." + file.removesuffix(".py").replace("/", ".")), owner)
        was = getattr(kind, function)

        def watched(*args: Any, real: Any = was, name: str = function, **options: Any) -> Any:
            began, result = next(calls), real(*args, **options)
            looked_at = [result] if name in ("pull", "next", "plan") else list(args[1:])
            if any(KEY in array for array in arrays(looked_at, set())):
                passed.append((began, name))
            return result

        monkeypatch.setattr(kind, function, watched)
    train([501, KEY, 502])
    assert [name for _, name in sorted(passed)] == way
    assert len(way) <= 9 and len({file for *_, file in stops()}) <= 15


def test_what_people_look_for_is_there() -> None:
    text = section("The way of a batch")
    places = re.findall(r"^\| [^|`]+ \| `(\w+)\.(\w+)`[^|]* \| ([\w/.]+) \|$", text, re.MULTILINE)
    assert len(places) >= 4
    for owner, function, file in places:
        assert has(file, owner, function), function


def test_the_page_of_classes_has_all_that_other_rooms_know() -> None:
    homes: dict[str, dict[str, str]] = {room: {} for room in ROOMS}
    for room in ROOMS:
        for path in (PACKAGE / room).rglob("*.py"):
            module = "skirl." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
            named = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
            homes[room] |= {name: module for name in named if not name.startswith("_")}
    known: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                room = node.module.partition(".")[2].partition(".")[0]
                if room in ROOMS and path.relative_to(PACKAGE).parts[0] != room:
                    known[room] |= {alias.name for alias in node.names if alias.name in homes[room]}
    room, listed = "", {room: [] for room in ROOMS}
    for line in re.findall(r"```text\n(.*?)```", section("Classes"), re.DOTALL)[0].splitlines():
        room = line[:10].strip() or room
        listed[room].append(line[10:34].strip())
        assert line[34:], line
    for room in ROOMS:
        assert len(listed[room]) == len(set(listed[room])), room
        assert known[room] <= set(listed[room]) <= homes[room].keys(), room
