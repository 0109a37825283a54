"""The training benchmark, tiny: every mode trains the same model, and the figures match the slices."""

import json
import math

import pytest

from skirl.cli import main
from skirl.measure.bench import train
from skirl.measure.bench.modes import Slice
from skirl.measure.bench.train import TrainSpeed, difference, hidden, quietest

SMALL = {
    "data": "synthetic:tiny", "dim": 4, "batch": 64, "depth": 8, "warm": 12, "slice": 3, "rounds": 4, "threads": 1,
}  # fmt: skip


def test_all_modes_train_the_same_model(tmp_path):
    pytest.importorskip("fbgemm_gpu", reason="not installed: constraints/others.txt")
    result = TrainSpeed(**SMALL, link="1Gbit,10us", store=f"disk:{tmp_path}").run()
    assert result["failed"] is None and result["losses_agree"]
    modes = result["modes"]
    assert set(modes) == {"skirl", "serial", "resident", "torch", "fbgemm", "lru", "on_demand"}
    for name in ("serial", "resident", "lru", "on_demand"):
        assert result["loss_difference"][name] == 0, name
    for key in ("vs_resident", "vs_torch", "vs_fbgemm", "vs_on_demand", "vs_lru", "vs_roof"):
        assert result[key] > 0, key
    assert modes["resident"]["bytes_received"] == modes["resident"]["bytes_sent"] == 0
    assert modes["torch"]["calls"] == 0
    moved = {name: mode["bytes_received"] + mode["bytes_sent"] for name, mode in modes.items()}
    assert moved["on_demand"] > moved["lru"] >= moved["skirl"] > 0
    assert result["byte_ratio_on_demand"] == round(moved["on_demand"] / moved["skirl"], 4)
    assert result["missing"] is None
    assert list(tmp_path.iterdir()) == [], "folders of stores are left"


def test_on_demand_moves_each_row_of_a_batch_twice():
    speed = TrainSpeed(**SMALL, modes="on_demand")
    setting, rows = speed._setting()
    mode = speed._make("on_demand", setting)
    assert mode is not None
    mode.slice(20)
    once = mode.slice(5)
    mode.close()
    assert once.sent == sum(rows[20:25]) * 4 * 4
    assert once.calls == 10
    assert 0 < once.received < once.sent, "rows used for the first time are made here"


def test_a_peer_that_is_not_installed_is_missing(monkeypatch):
    monkeypatch.setattr("skirl.measure.bench.modes.fbgemm_or_none", lambda setting: None)
    result = TrainSpeed(**SMALL, modes="skirl,fbgemm").run()
    assert result["vs_fbgemm"] is None and result["missing"] == "fbgemm: not installed"


def test_losses_that_differ_fail_the_command(monkeypatch, capsys):
    monkeypatch.setattr(train, "agree", lambda losses: False)
    flags = [f"--{name}={value}" for name, value in SMALL.items()]
    assert main(["bench", "train", "--modes", "skirl", "--json", *flags]) == 1
    out = capsys.readouterr()
    assert json.loads(out.out)["losses_agree"] is False
    assert "losses differ" in out.err


def test_what_counts_as_agreement():
    same = {"skirl": [1.0, 0.5], "lru": [1.0, 0.5], "torch": [1.0, 0.5 + 1e-6]}
    assert train.agree(same)
    assert not train.agree(same | {"lru": [1.0, 0.5 + 1e-9]}), "skirl's own have to agree to the last bit"
    assert not train.agree(same | {"torch": [1.0, 0.51]})
    assert not train.agree(same | {"torch": [1.0, math.nan]}), "and a loss that is no number never does"
    assert difference(same)["torch"] == pytest.approx(2e-6)


def test_hidden_is_of_what_could_be():
    assert hidden([2.0, 2.0, 9.0], [1.0, 1.25, 1.5], [1.0, 1.0, 1.0]) == 0.75
    assert hidden([1.0], [1.0], [1.0]) is None
    assert hidden(None, [1.0], [1.0]) is None


def test_the_quieter_rounds_are_chosen_by_what_others_took():
    def turn(number: int, others: float) -> Slice:
        return Slice(1.0, 1.0, 0, 0, 0, others, [float(number)])

    turns = {"a": [turn(0, 0.9), turn(1, 0.1), turn(2, 0.2), turn(3, 0.8)], "b": [turn(i, 0.0) for i in range(4)]}
    assert {name: [s.losses[0] for s in chosen] for name, chosen in quietest(turns).items()} == {
        "a": [1, 2],
        "b": [1, 2],
    }


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"modes": "skirl,belady"}, "modes has 'belady': set it to some of skirl"),
        ({"rounds": 0}, "rounds is 0: set it to 1 or more"),
        ({"cache": "4GiB"}, "set it to a number of rows or to a share like touched:10%"),
        ({"link": "1Gbit"}, "write it RATE,DELAY"),
    ],
)
def test_refuses(wrong, words):
    with pytest.raises(ValueError, match=words):
        TrainSpeed(**wrong)
