"""`skirl verify` with several trainers: real processes compared with the plain reference."""

import numpy as np
import pytest
import torch

from skirl.cli.train import Verify
from skirl.train import verify_trainers as module
from skirl.train.verify import Trace

TINY = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 16, "steps": 6, "quiet": True, "threads": 1}


@pytest.fixture
def one_case(monkeypatch):
    monkeypatch.setattr(module, "DEPTHS", (2,))
    monkeypatch.setattr(module, "STORES", ("disk",))


@pytest.mark.usefixtures("one_case", "forked_trainers")
def test_two_processes_are_equal_to_the_reference_and_a_wrong_bit_is_named(monkeypatch):
    joined = module._joined

    def spoilt(folder, number, size) -> tuple[Trace, int]:
        trace, moved = joined(folder, number, size)
        if number == 1:  # the second of the three caches
            trace.rows[3].view(np.uint32)[0] ^= 1
        return trace, moved

    monkeypatch.setattr(module, "_joined", spoilt)
    found = Verify.of(**TINY, optimizer="adam", cache="touched:60%", shards=4, trainers="2").run()
    assert (found["runs"], found["differences"]) == (3, 1)
    assert found["failed"].startswith("1 of 3 runs differ: 2 trainers, cache ")
    assert "equal after it, but not at the end of the run" in found["failed"]


@pytest.mark.usefixtures("one_case", "forked_trainers")
def test_tables_by_rows_whole_and_by_columns_are_equal_to_the_reference():
    found = Verify.of(
        **TINY | {"dim": 6, "steps": 12},
        optimizer="adam",
        cache="touched:40%",
        shards=4,
        trainers="3",
        placement="mixed",
    ).run()
    assert (found["runs"], found["differences"], found["failed"]) == (3, 0, None)


@pytest.mark.usefixtures("one_case", "forked_trainers")
def test_samples_that_fill_no_whole_batch_are_left_out_at_the_end_of_each_epoch(tmp_path):
    lines = ["click,item"] + [f"{n % 2},{7 * n % 31}" for n in range(37)]
    (tmp_path / "clicks.csv").write_text("\n".join(lines))
    (tmp_path / "clicks.toml").write_text('[[label]]\nname = "click"\n[[id]]\nname = "item"\ntype = "int"\n')
    data = {"data": f"csv:{tmp_path / 'clicks.csv'}", "schema": tmp_path / "clicks.toml", "steps": None, "epochs": 2}
    found = Verify.of(**TINY | data, rows="40", optimizer="adam", cache=40, shards=2, trainers="2").run()
    assert (found["steps"], found["differences"]) == (4, 0)


@pytest.mark.usefixtures("one_case", "forked_trainers")
def test_the_reference_has_as_many_threads_as_the_trainers():
    flags = {**TINY, "data": "synthetic:sessions", "model": "dcat-tiny", "batch": 64, "steps": 3, "pooling_factor": 6}
    torch.set_num_threads(2)
    try:
        found = Verify.of(**flags | {"threads": None}, cache="touched:60%", shards=2, trainers="2").run()
    finally:
        torch.set_num_threads(1)
    assert (found["threads"], found["differences"]) == (1, 0)
