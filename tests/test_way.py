"""The way of a key, as docs/design.md tells it: every stop exists, and none occurs twice."""

import ast
import re
from pathlib import Path

import skirl

ROOT = Path(__file__).parents[1]


def test_every_stop_of_the_way_of_a_key_exists():
    page = (ROOT / "docs" / "design.md").read_text()
    section = re.search(r"^## The way of a key\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    assert section
    stops = re.findall(r"^\| (\d+) \| `(\w+)\.(\w+)` \| ([\w/.]+) \|", section[1], re.MULTILINE)
    assert [int(number) for number, *_ in stops] == list(range(1, len(stops) + 1))
    assert 5 <= len(stops) <= 9
    assert len({stop[1:] for stop in stops}) == len(stops), "it turns back"
    for _, owner, function, file in stops:
        tree = ast.parse((Path(skirl.__file__).parent / file).read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
        assert classes, f"{file} has no {owner}"
        assert function in {node.name for node in classes[0].body if isinstance(node, ast.FunctionDef)}, function
