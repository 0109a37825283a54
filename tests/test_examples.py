"""The examples run, and the docs show how they differ."""

import re
from pathlib import Path

import pytest

from tests.warm import Python

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def losses_of(python: Python, name: str) -> list[float]:
    """Run an example. It prints a loss every 50 steps, and the last is lower than the first."""
    done = python.run("import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", name, cwd=EXAMPLES)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    return losses


@pytest.mark.parametrize("name", ["with_lightning.py", "with_datasets.py"])
def test_it_learns(python: Python, name: str) -> None:
    losses_of(python, name)


def test_skirl_and_plain_torch_print_the_same_losses(python: Python) -> None:
    """They sum in another order, which may change the last digit."""
    ours, plain = (losses_of(python, name) for name in ("with_skirl.py", "with_embedding_bag.py"))
    assert ours == pytest.approx(plain, abs=1.01e-4)


OPTUNA = """
import contextlib, io, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from skirl.cli import main
from skirl.sweep.fused import Forms

Forms.only = "loop"

def run(words, **options):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words[3:]) == 0
    return SimpleNamespace(stdout=out.getvalue())

subprocess.run = run
exec(Path(sys.argv[1]).read_text().replace("--steps 200", "--steps 10 --processes 1"))
"""
"""The example, whose sweeps are short, in turn and in this process."""


def test_optuna_draws_two_sweeps_of_eight(python: Python) -> None:
    pytest.importorskip("optuna")
    done = python.run(OPTUNA, str(EXAMPLES / "with_optuna.py"))
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["8", "16"]


TRAINERS = """
import os, runpy, sys, torch
torch.set_num_threads(1)
os.chdir(sys.argv[1])
sys.path.insert(0, "")
ran = runpy.run_path("trainers.py", run_name="__main__")
print([weight.tolist() for weight in ran["model"].parameters()])
"""


def test_two_trainers_end_with_the_weights_of_one(python: Python) -> None:
    """And the loss falls."""
    alone = python.run(TRAINERS, str(EXAMPLES))
    assert alone.returncode == 0, alone.stderr
    *lines, total, weights = alone.stdout.splitlines()
    losses = [float(line.split()[-1]) for line in lines]
    assert len(losses) == 4 and losses[-1] < losses[0]
    for rank, process in enumerate(python.team(2, TRAINERS, str(EXAMPLES))):
        with process:
            out, err = process.communicate(120)
            assert process.returncode == 0, err
            assert out.splitlines()[-1] == weights
            assert len(out.splitlines()) == (6 if rank == 0 else 1)
            assert rank or out.splitlines()[-2] == total


def test_the_docs_show_every_line_that_differs() -> None:
    """Except imports, docstrings, the constructor's argument and the print, which say nothing about skirl."""
    block = re.search(r"```diff\n(.*?)```", (ROOT / "docs/coming-from.md").read_text(), re.DOTALL)
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
