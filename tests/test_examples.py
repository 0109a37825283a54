"""The examples run, and the README shows how they differ."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.zygote import Python

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("name", ["with_embedding_bag.py", "with_skirl.py", "with_lightning.py", "with_datasets.py"])
def test_it_learns(python: Python, name: str) -> None:
    """Each prints a loss every 50 steps, and the last is below the first."""
    if name == "with_skirl.py":  # as its readers run it
        done = subprocess.run([sys.executable, name], cwd=EXAMPLES, capture_output=True, text=True, timeout=120)
    else:
        done = python.run("import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", name, cwd=EXAMPLES)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_the_readme_shows_every_line_that_differs() -> None:
    """Imports, docstrings, the constructor's argument and the print apart, which say nothing about skirl."""
    block = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block
    shown = {sign: {line[1:].strip() for line in block[1].splitlines() if line.startswith(sign)} for sign in "-+"}
    plain, ours = (_lines(EXAMPLES / name) for name in ("with_embedding_bag.py", "with_skirl.py"))
    assert _said(plain - ours) <= shown["-"] <= plain
    assert _said(ours - plain) <= shown["+"] <= ours


def _lines(path: Path) -> set[str]:
    return {line.strip() for line in path.read_text().splitlines() if line.strip()}


def _said(lines: set[str]) -> set[str]:
    aside = ('"""', "import ", "from ", "def __init__", "print(", "if step", "if batches")
    return {line for line in lines if not line.startswith(aside)}
