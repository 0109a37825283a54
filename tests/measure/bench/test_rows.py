"""`skirl bench rows`: the sides agree, the figures are consistent, and wrong flags are refused."""

import json
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from skirl.cli import main
from skirl.core.optim import SGD
from skirl.data import Synthetic
from skirl.measure.bench import others, rows
from skirl.measure.bench.rows import RowsSpeed
from skirl.measure.bench.sides import Skirl, TorchBags
from tests.warm import Python

TINY = {"data": "tiny", "rows_scale": 0.01, "batch": (16,), "dim": (16,), "rounds": 2, "memory": ("system",)}


@pytest.fixture(scope="module")
def result():
    threads = torch.get_num_threads()
    try:
        yield RowsSpeed(**TINY, threads=2).measure()  # in this process, because a child would import and compile again
    finally:
        torch.set_num_threads(threads)


def test_every_case_is_there_and_its_ratios_follow_from_its_times(result):
    named = [(case["pooling"], case["optimizer"]) for case in result["cases"]]
    assert named == [(1, "sgd"), (1, "rowwise-adagrad"), (4, "sgd"), (4, "rowwise-adagrad")]
    for case in result["cases"]:
        ms = case["ms"]
        assert ms["skirl"] > ms["kernels"] > 0 and ms["group"] > 0
        assert case["ids"] == 16 * 6 or case["pooling"] > 1
        assert (case["vs_embeddingbag"] is None) == (case["optimizer"] != "sgd")
        for other in ("fbgemm", "embeddingbag"):
            if case[f"vs_{other}"] is not None:
                assert case[f"kernels_vs_{other}"] >= case[f"vs_{other}"] > 0
        assert case["thread_scaling"] > 0


def test_overall_figures_are_of_all_cases(result):
    ratios = [case["vs_embeddingbag"] for case in result["cases"] if case["vs_embeddingbag"] is not None]
    assert result["vs_embeddingbag_min"] == min(ratios)
    assert min(ratios) <= result["vs_embeddingbag_geomean"] <= max(ratios)
    assert result["thread_scaling_geomean"] > 0


@pytest.mark.skipif(find_spec("fbgemm_gpu") is None, reason="not installed: constraints/others.txt")
def test_fbgemm_is_measured_where_it_is_installed(result):
    assert result["vs_fbgemm_min"] > 0 and result["missing"] is None


def test_without_fbgemm_its_figures_are_null_and_the_text_says_how_to_install(monkeypatch):
    monkeypatch.setattr(others, "has_fbgemm", lambda: False)
    bench = RowsSpeed(**TINY | {"pooling": (1,), "optimizer": ("sgd",)})
    result = bench.measure()
    assert result["vs_fbgemm_geomean"] is None and result["kernels_vs_fbgemm_min"] is None
    assert result["vs_embeddingbag_geomean"] > 0
    shown = bench.summary(result | {"memory": ["system"]})
    assert "pip install" in shown["missing"] and "fbgemm" not in shown["system 16 x 16 sgd"]


def test_sides_that_differ_are_not_reported(monkeypatch):
    monkeypatch.setattr(Skirl, "output", lambda self, out: out.detach() + 1)
    with pytest.raises(AssertionError, match=r"outputs of skirl and .* differ"):
        RowsSpeed(**TINY | {"pooling": (1,), "optimizer": ("sgd",)}).measure()


def test_rows_that_differ_are_not_reported(monkeypatch):
    monkeypatch.setattr(TorchBags, "backward", lambda self, out: None)
    with pytest.raises(AssertionError, match="differ by"):
        RowsSpeed(**TINY | {"pooling": (1,), "optimizer": ("sgd",)}).measure()


def test_slots_are_laid_out_as_the_others_have_their_rows():
    data = Synthetic("tiny", batch_size=8, rows_scale=0.01)
    tables = data.tables(16)
    given = rows._given(data.batch(0).sparse, tables, 0)
    ids = data.batch(0).sparse.values().reshape(6, 8).numpy()
    base = 0
    for f, table in enumerate(tables):
        assert (given.step.slots[f * 8 : f * 8 + 8] == base + ids[f]).all()
        base += table.rows
    side = Skirl(tables, SGD(lr=0.1), torch.ones(8, 6, 16))
    out = side.forward(given)
    assert torch.equal(side.output(out)[3, 0], side.weights()[given.step.slots[3]])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"batch": (0,)}, "batch is 0: set it to 1 or more"),
        ({"dim": ()}, "dim is empty: name at least one"),
        ({"dim": (6,)}, "FBGEMM takes only multiples of 4"),
        ({"rounds": 0}, "rounds is 0: set it to 1 or more"),
        ({"threads": 0}, "threads is 0: set it to 1 or more"),
        ({"rows_scale": 0.0}, "rows_scale is 0.0"),
    ],
)
def test_bad_flags_are_refused_with_what_to_set(flags, says):
    with pytest.raises(ValueError, match=says):
        RowsSpeed(**TINY | flags)


def test_the_command_measures_in_child_processes_and_prints_one_json_line(python: Python, capsys, monkeypatch):
    def child(arguments: list[str], env: dict[str, str]) -> Any:
        """Run the child that uses the system's memory allocator as a fork, because an interpreter takes seconds to start."""
        if env:
            return real(arguments, env)
        _, module, flags = arguments
        done = python.run(f"import runpy; runpy.run_module({module!r}, run_name='__main__')", flags)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    real = rows.child
    monkeypatch.setattr(rows, "child", child)
    flags = [
        "--data",
        "tiny",
        "--rows-scale",
        "0.01",
        "--batch",
        "16",
        "--dim",
        "16",
        "--rounds",
        "2",
        "--pooling",
        "1",
    ]
    assert main(["bench", "rows", *flags, "--optimizer", "sgd", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert result["bench"] == "rows" and result["memory"] == ["system", "kept"]
    assert [case["memory"] for case in result["cases"]] == ["system", "kept"]
    assert result["vs_embeddingbag_geomean"] > 0 and result["kept_vs_embeddingbag_geomean"] > 0
    assert RowsSpeed(**TINY).summary(result)["kept, embeddingbag"]
