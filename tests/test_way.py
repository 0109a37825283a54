"""The way of a batch, as docs/design.md tells it: every stop exists, none occurs twice, and so does what people look for."""

import ast
import re
from pathlib import Path

import skirl

ROOT = Path(__file__).parents[1]


def section() -> str:
    page = (ROOT / "docs" / "design.md").read_text()
    found = re.search(r"^## The way of a batch\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    assert found
    return found[1]


def has(file: str, owner: str, function: str) -> bool:
    tree = ast.parse((Path(skirl.__file__).parent / file).read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
    assert classes, f"{file} has no {owner}"
    return function in {node.name for node in classes[0].body if isinstance(node, ast.FunctionDef)}


def test_every_stop_of_the_way_of_a_batch_exists():
    stops = re.findall(r"^\| (\d+) \| `(\w+)\.(\w+)` \| ([\w/.]+) \|", section(), re.MULTILINE)
    assert [int(number) for number, *_ in stops] == list(range(1, len(stops) + 1))
    assert 5 <= len(stops) <= 9
    assert len({stop[1:] for stop in stops}) == len(stops), "it turns back"
    for _, owner, function, file in stops:
        assert has(file, owner, function), function


def test_what_people_look_for_is_there():
    places = re.findall(r"^\| [^|`]+ \| `(\w+)\.(\w+)`[^|]* \| ([\w/.]+) \|$", section(), re.MULTILINE)
    assert len(places) >= 5
    for owner, function, file in places:
        assert has(file, owner, function), function
