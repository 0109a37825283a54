"""`skirl bench dedup`: its counts are right, and it prints a figure for each factor."""

import pytest
import torch
from skirl.dedup.shifting import Shifting, told_of

from skirl.core.batch import KeyedJagged
from skirl.dedup.bench import Dedup
from skirl.dedup.training import Training, described, sessions
from skirl.measure.bench.dedup import DedupStep
from skirl.measure.bench.others import by_vbe, has_fbgemm
from skirl.measure.bench.train import TrainSpeed


def test_every_factor_has_its_figures():
    bench = DedupStep(factor=(1.0, 4.0), batch=256, lists=2, ids=12, dim=16, rows=1000, rounds=1)
    found = bench.measure()
    for part in ("lookup", "mixed"):
        assert found[part]["x"].keys() == {"1", "4"} and min(found[part]["x"].values()) > 0
        assert found[part]["ids"]["1"] == found[part]["ids_expanded"]["1"]
    assert 3 < found["lookup"]["ids_expanded"]["4"] / found["lookup"]["ids"]["4"] < 5
    assert "times as fast as expanded" in bench.summary(found)["lookup, factor 4"]


def test_mixed_is_measured_at_8_too_and_by_itself():
    bench = Dedup(("mixed",), factor=(1.0, 4.0, 8.0, 16.0), batch=64, ids=6, dim=8, rows=500, rounds=1)
    found = bench.run()
    assert found["mixed"]["x"].keys() == {"1", "8", "16"} and "lookup" not in found and found["part"] == ["mixed"]
    told = bench.summary(found)
    assert told["step"].startswith("64 samples of one list and 26 single ids")
    assert "times as fast as expanded" in told["mixed, factor 8"] and not any(
        name.startswith("lookup") for name in told
    )


def test_fbgemm_is_measured_on_each_list_once_where_it_is_installed():
    bench = DedupStep(factor=(1.0, 4.0), batch=64, lists=2, ids=6, dim=8, rows=500, rounds=1)
    found = bench.measure()
    told = bench.summary(found)["lookup, factor 4"]
    for part in ("lookup", "mixed"):
        assert found[part]["vs_vbe"].keys() == {"1", "4"}
        assert all((ratio or 0) > 0 if has_fbgemm() else ratio is None for ratio in found[part]["vs_vbe"].values())
    assert ("of FBGEMM on each list once" in told) == has_fbgemm()


def test_each_bag_is_looked_up_once_and_copied_to_its_samples():
    """With an operator in the place of FBGEMM's, which returns one feature's bags after the other's."""
    weights, calls = [torch.randn(9, 2), torch.randn(9, 3)], []

    def operator(values, offsets, batch_size_per_feature_per_rank=None):
        calls.append(batch_size_per_feature_per_rank)
        strides = [stride for (stride,) in batch_size_per_feature_per_rank or [[3], [3]]]
        bags = [values[offsets[i] : offsets[i + 1]] for i in range(len(offsets) - 1)]
        outs = [
            torch.stack([table[bag].sum(0) for bag in part])
            for table, part in zip(weights, (bags[: strides[0]], bags[strides[0] :]))
        ]
        return torch.cat([out.flatten() for out in outs]) if batch_size_per_feature_per_rank else torch.cat(outs, 1)

    ids = KeyedJagged(["a", "b"], torch.tensor([1, 2, 3, 4, 5, 6]), lengths=torch.tensor([1, 1, 1, 2, 1]), strides=[3, 2],
                      inverse={"b": torch.tensor([1, 0, 1])})  # fmt: skip
    assert torch.equal(by_vbe(operator, ids, [2, 3]), by_vbe(operator, ids.expanded(), [2, 3]))
    assert calls == [[[3], [2]], None]


def test_lookup_and_mixed_are_measured_in_one_go(monkeypatch):
    ran = []
    monkeypatch.setattr(DedupStep, "run", lambda self: ran.append(self.part) or {})
    monkeypatch.setattr(Shifting, "run", lambda self: {"lookup_x": 2.0})
    assert Dedup(("lookup", "mixed")).run() == {"window": {"lookup_x": 2.0}, "part": ["lookup", "mixed"]}
    assert ran == [("lookup",)]


def test_figures_of_windows_are_beside_each_other_whatever_their_part(monkeypatch):
    asked = []
    monkeypatch.setattr(DedupStep, "run", lambda self: {})
    monkeypatch.setattr(Shifting, "run", lambda self: {"lookup_x": 2.0})
    monkeypatch.setattr(Training, "run", lambda self: asked.append((self.factor, self.models)) or trained(self))
    found = Dedup(("lookup", "train"), factor=(4.0,)).run()
    assert found["window"] == {
        "lookup_x": 2.0, "train_x": {"dcat": 1.5, "din": 1.5}, "train_spread": {"dcat": [1, 2], "din": [1, 2]}
    }  # fmt: skip
    assert asked == [((4.0,), ("dcat", "dlrm", "din")), ((0.0,), ("dcat", "din"))]
    assert found["train"]["x"]["dlrm"] == {"4": 1.5}


def trained(bench):
    factor = f"{bench.factor[0]:g}"
    return {name: {model: {factor: of} for model in bench.models} for name, of in (("x", 1.5), ("spread", [1, 2]))}


def test_windows_have_their_figures():
    """Sums of both sides agree; otherwise there would be no ratio. Factor 0 of training stands for windows."""
    found = Shifting(batch=256, lists=2, ids=12, dim=8, rows=500, rounds=1).measure()
    assert found["lookup_ids"] < found["lookup_ids_once"] / 3 and found["lookup_x"] > 0
    of_din = Training((0.0,), ("din",), batch=64, steps=2, ids=6, dim=8, rows=500, rounds=1).measure()
    assert of_din["x"]["0"] > 0 and of_din["achieved"]["0"] > 3 and {"ms", "ms_once"} < of_din.keys()
    told = told_of(found | {"train_x": {"din": 1.25}, "train_spread": {"din": [1.1, 1.4]}})
    assert "times as fast as with each distinct list once" in told["windows, lookup"]
    assert told["windows, din"].startswith("1.25 times as fast as with each distinct list once (1.10 to 1.40)")


def test_training_has_figures_by_model_and_factor():
    """Losses on both files agree; otherwise there would be no ratio."""
    bench = Training((1.0, 4.0), ("din",), batch=64, steps=2, ids=6, dim=8, rows=500, rounds=1)
    found = bench.measure()
    assert found["x"].keys() == {"1", "4"} and min(found["x"].values()) > 0
    assert found["achieved"]["1"] == 1 and 2 < found["achieved"]["4"] < 6
    told = described({name: {"din": by_factor} for name, by_factor in found.items()})
    assert "times as fast as with all lists in full" in told["din, factor 4"]
    with pytest.raises(ValueError, match="factor is 20: set it to at most"):
        sessions(20, bench, 3)


def test_others_that_know_of_no_shared_lists_are_not_run_on_them():
    with pytest.raises(ValueError, match="data is 'synthetic:sessions', whose samples share lists"):
        TrainSpeed(data="synthetic:sessions")


@pytest.mark.parametrize(("flags", "text"), [({"factor": (0.5,)}, "factor is 0.5"), ({"rounds": 0}, "rounds is 0")])
def test_wrong_flags_are_refused(flags, text):
    with pytest.raises(ValueError, match=text):
        DedupStep(**flags)
