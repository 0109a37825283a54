"""`skirl bench place --part torchrec`: plans that TorchRec runs train the same as plain torch; and its output."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from skirl.cli import main
from skirl.placement.torchrec import bench, bench_rank

pytest.importorskip("torchrec", reason="not installed: constraints/others.txt")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def alone(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    dist.destroy_process_group()


def test_what_torchrec_trains_is_what_plain_torch_trains(alone):
    """With one rank nothing is exchanged, but kernels, optimizers and the dense part are those used with two."""
    found = bench_rank.differences(2, 0)
    assert set(found) == {f"{k}, {o}" for k in ("whole", "rows", "columns", "planned") for o in bench_rank.OPTIMIZERS}
    adagrad = found.pop("columns, rowwise-adagrad")
    assert 0 < max(found.values()) < 1e-5 < 1e-3 < adagrad  # each part of a row has a different number


@pytest.mark.slow
def test_two_ranks(capsys):
    found = bench.ranks_found(
        {"steps": 10, "seed": 1, "tasks": 1, "batch": 64, "hidden": [8], "turns": 2, "combinations": 12}
    )
    adagrad = found["differences"].pop("columns, rowwise-adagrad")
    assert max(found["differences"].values()) < 1e-5 < 1e-3 < adagrad
    assert found["iterations"][0]["ratio"] > 0


def made(said: Any) -> dict[str, Any]:
    task = {"tables": 3, "ratio": 0.8, "ms": {"skirl": 8.0, "torchrec": 10.0},
            "median_ratio": 0.9, "noise": 0.03, "cpu_ratio": 0.7, "balance": {"skirl": 1.0, "torchrec": 1.2},
            "kinds": {"skirl": {"row_wise": 1, "table_wise": 2}, "torchrec": {"table_wise": 3}}}  # fmt: skip
    return {
        "differences": {"whole, sgd": 1e-7, "columns, rowwise-adagrad": 0.2},
        "iterations": [task, {**task, "ratio": 1.0, "balance": {"skirl": 1.1, "torchrec": 1.6}}],
    }


def test_what_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(bench, "ranks_found", made)
    monkeypatch.setattr(bench, "TABLES", 12)
    monkeypatch.setattr(bench, "SECONDS", 0.5)
    assert main(["bench", "place", "--part", "torchrec", "--tasks", "2"]) == 0
    said = capsys.readouterr().out
    for text in (
        "1.0e-07 at the most",
        "2.0e-01 under row-wise Adagrad",
        "0 of 12 are missing",
        "1 row-wise, 2 table-wise",
        "0.900 of TorchRec's",
        "0.729 if TorchRec's work were even; busier rank over the mean 1.050, TorchRec's 1.400",  # 1 / 1.2 and 1 / 1.6
        "repeats differ by 3.0%",
    ):
        assert text in said


def test_a_rank_that_fails_is_told(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho first >&2; echo no memory >&2; exit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(bench.sys, "executable", str(python))
    with pytest.raises(RuntimeError, match=r"rank \d did not end well: no memory"):
        bench.ranks_found({})
