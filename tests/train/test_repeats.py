"""How often lists repeat within a batch, as shown during a run, in its metrics, its result and its report."""

import json
from itertools import pairwise

import pytest

from skirl.cli import main
from skirl.data.sessions import Sessions

FLAGS = [
    "--data", "synthetic:sessions", "--model", "dlrm-tiny", "--dim", "4", "--batch", "32", "--pooling-factor", "9",
    "--lists", "2", "--cache", "touched:100%", "--log-every", "2", "--steps", "6",
]  # fmt: skip


def counted(first, last):
    """Count the same from the ids of plain batches: a list equal to the one above it in its batch is not looked up."""
    ids = held = 0
    for number in range(first, last):
        batch = Sessions(batch_size=32, pooling_factor=9, histories=2, once=False).batch(number).sparse
        for lists in (batch.select([name]) for name in ("seen_1", "seen_2")):
            found, offsets = set(), lists.offsets().tolist()
            for low, high in pairwise(offsets):
                held += 0 if (of := tuple(lists.values()[low:high].tolist())) in found else high - low
                found.add(of)
            ids += len(lists.values())
    return ids / held


def test_the_factor_of_a_run_in_two_goes(tmp_path, capsys):
    run, save = tmp_path / "run", tmp_path / "saved"
    where = ["--run", str(run), "--save", str(save), "--save-every", "4"]
    assert main(["train", *FLAGS[:-1], "4", *where]) == 0
    assert f"factor {counted(0, 1):.1f}" in capsys.readouterr().out, "the progress says it from the first step on"
    assert main(["train", *FLAGS, *where, "--resume", "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["factor"] == pytest.approx(counted(0, 6)) and result["factor"] > 2
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line["factor"] for line in lines if line["kind"] == "train"}
    assert found == {step: pytest.approx(counted(step - 2, step)) for step in (2, 4, 6)}
    assert main(["report", str(run)]) == 0
    assert f"{result['factor']:.1f} times as many ids in lists as were looked up" in capsys.readouterr().out
