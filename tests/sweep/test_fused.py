"""Variants that are fused leave the bits of their lone runs; what cannot be fused trains in turn; faults are seen."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils._pytree import tree_leaves

from skirl import SGD, Adagrad, Adam
from skirl.cli.sweep import SweepCommand
from skirl.sweep import contender, fused
from skirl.sweep.contender import Contender, step_dense
from skirl.sweep.fused import MEASURED, PRODUCTS, Forms, Fused, Group, same_bits
from skirl.train.recipe import Recipe
from tests.sweep.runs import Case, Of, check
from tests.sweep.test_files import FLAGS, files
from tests.sweep.test_models import check as as_alone

MODELS = ("dlrm-tiny", "wide-deep-tiny", "deepfm-tiny", "dcnv2-tiny", "deep-cross-tiny", "din-tiny")


@pytest.fixture(autouse=True)
def form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forms, "only", "fused")


def compare(model: str, count: int, batch: int, steps: int = 4) -> int:
    """Train variants of one architecture and each alone. Return how many steps of variants were fused."""
    flags = {"dim": 16, "batch": batch, "steps": steps, "cache": "touched:60%", "threads": 1}
    recipe = Recipe.of(data="synthetic:criteo-kaggle", model=model, **flags)
    sweep = as_alone(recipe, [f"lr={','.join(str(0.02 * (n + 1)) for n in range(count))}"])
    return sweep.forms.steps["fused"]


SIZES = [*zip(cycle(MODELS), (1, 2, 3, 4, 5, 3) * 3, (32,) * 6 + (128,) * 6 + (500,) * 6)]
"""Each model with three sizes of batches: `make test` has one each of three models."""


@pytest.mark.parametrize(
    ("model", "count", "batch"),
    [pytest.param(*case, marks=() if n in (3, 8, 17) else pytest.mark.slow) for n, case in enumerate(SIZES)],
)
def test_models_train_as_alone(model: str, count: int, batch: int):
    assert compare(model, count, batch) == (3 * count if count > 1 else 0)


def test_small_batches_have_their_bits_in_either_form():
    for model, batch in (("dlrm-tiny", 1), ("dcnv2-tiny", 7)):
        compare(model, 3, batch)


class Tower(nn.Module):
    """A model whose loss calls it once, over rows by feature."""

    def __init__(self, embeddings: Any, width: int, dropout: float) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.first = nn.Linear(sum(t.dim * len(t.features) for t in embeddings.tables), width)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(width, 1)
        self.frozen = nn.Linear(1, 1).requires_grad_(False)
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, sparse: Any) -> Tensor:
        rows = self.embeddings(sparse)
        hidden = torch.relu(self.first(torch.cat([rows[name] for name in ("x", "b", "c", "y")], 1)))
        return self.frozen(self.last(self.drop(hidden))).squeeze(1) * self.scale

    def loss(self, batch: Any) -> Tensor:
        return binary_cross_entropy_with_logits(self(batch.sparse), batch.labels)


class Noisy(torch.optim.SGD):
    """Its steps draw random numbers."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight.add_(torch.randn_like(weight), alpha=1e-3)


def make(
    variant: Any, kind: type[Tower] = Tower, other: type[torch.optim.SGD] = torch.optim.SGD
) -> tuple[nn.Module, torch.optim.Optimizer]:
    own = variant.overrides
    model, weights = kind(variant.embeddings, own["width"], own["dropout"]), []
    weights = [w for name, w in model.named_parameters() if "anchor" not in name]
    return model, (other if own["seed"] == 2 else torch.optim.Adam)(weights, lr=own["dense_lr"])


MIXED = (
    Of(width=64),
    Of(width=64, lr=0.5, rule=Adam(), seed=3, dropped=5),
    Of(width=64, seed=2, rule={"a": Adagrad(), "*": SGD(momentum=0.9)}),
    Of(width=64, dense_lr=1e30, nan=99),  # its loss is soon not finite
    Of(width=64, dim=8),
    Of(width=64, dim=8, seed=1),
    Of(width=64, dropout=0.5),
)


def test_dropped_diverged_and_other_optimizers(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    captured, capture = Counter[int](), fused.capture
    monkeypatch.setattr(fused, "capture", lambda dense: captured.update([id(dense._model)]) or capture(dense))
    sweep = check(Case(MIXED, steps=12, kind="disk", folder=tmp_path), made=make, plain=False)
    assert sweep.forms.steps["fused"] > 30 and sweep["v3"].left is not None, "v3 has diverged"
    kept = [captured[id(sweep[name].model)] for name in ("v0", "v2", "v4", "v5", "v6")]
    assert kept == [1, 1, 1, 1, 3], "graphs of those that were fused stay when others leave"


@pytest.mark.parametrize(
    ("more", "other"),
    [({"resumed": 4, "killed": "saves", "steps": 8}, torch.optim.SGD), ({"accumulate": 2, "steps": 4}, Noisy)],
)
def test_resumed_and_accumulated(more: dict[str, Any], other: type[torch.optim.SGD], tmp_path: Any):
    case = Case((*MIXED[:3], *MIXED[4:]), folder=tmp_path, **more)
    assert check(case, made=partial(make, other=other), plain=False).forms.steps["fused"]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
def test_optimizers_that_step_together_step_as_alone(kind: Any):
    draw, called = torch.Generator().manual_seed(0), []
    both = [[nn.Parameter(torch.ones(2, n)) for n in (3, 4, 5)] for _ in range(2)]
    optimizers = [[kind([weight], lr=0.1 * n) for n, weight in enumerate(weights, 1)] for weights in both]
    optimizers[0][2].register_step_pre_hook(lambda *_: called.append(1))
    for _ in range(3):
        for pair in zip(*both, strict=True):
            pair[0].grad = torch.randn(pair[0].shape, generator=draw)
            pair[1].grad = pair[0].grad.clone()
        each = [SimpleNamespace(dense=dense, ends_step=True, turn=nullcontext) for dense in optimizers[0]]
        step_dense(cast(list[Contender], each))
        for dense in optimizers[1]:
            dense.step()
    assert all(map(torch.equal, *both)) and len(called) == 3 and all(weight.grad is None for weight in both[0])
    saved, wanted = ([tree_leaves(dense.state_dict()) for dense in each] for each in optimizers)
    assert all(map(same_bits, *map(tree_leaves, (saved, wanted))))


class Decays(Tower):
    """Its first layer gets four gradients, which add up in an order."""

    def forward(self, sparse: Any) -> Tensor:
        rows = self.embeddings(sparse)
        x = torch.cat([rows[name] for name in ("x", "b", "c", "y")], 1)
        hidden = torch.relu(self.first(x * torch.relu(self.first(x)).mean(1, keepdim=True)))
        return self.last(hidden + torch.tanh(self.first(x))).squeeze(1)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.001 * sum(weight.square().sum() for weight in self.first.parameters())


class Anneals(Tower):
    """Its forward is another from one step on, which its optimizer says."""

    power = 1.0

    def forward(self, sparse: Any) -> Tensor:
        return super().forward(sparse) * self.power

    def changes(self) -> None:
        self.power = 2.0


class Thaws(Anneals):
    def changes(self) -> None:
        self.frozen.requires_grad_(True)


class Says(torch.optim.SGD):
    def __init__(self, model: Anneals) -> None:
        super().__init__([weight for name, weight in model.named_parameters() if "anchor" not in name], lr=0.1)
        self.model, self.count = model, 0

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.count += 1
        if self.count == 5:
            self.model.changes()


class Counts(Tower):
    def forward(self, sparse: Any) -> Tensor:
        self.scale *= 0.99
        return super().forward(sparse)


class Draws(Tower):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * torch.rand(())


class Tosses(Tower):
    """Draws by what it computes, so not ahead of it."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * torch.bernoulli(torch.sigmoid(self(batch.sparse).detach())).mean()


class Reseeds(Tower):
    def loss(self, batch: Any) -> Tensor:
        found = super().loss(batch) * torch.rand(())
        torch.manual_seed(7)
        return found


class Wrapped(Tower):
    """As a compiled module is."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.forward = super().forward


class Asks(Tower):
    """Takes a number of the batch that a graph does not know of."""

    def forward(self, sparse: Any) -> Tensor:
        return super().forward(sparse) * float(sparse.values().sum() % 7)


class Hooks(Tower):
    """Its rows are not those that were looked up."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.embeddings.register_forward_hook(lambda *of: {name: 2 * of[2][name] for name in ("x", "b", "c", "y")})


@pytest.mark.parametrize("kind", [pytest.param(Reseeds, marks=pytest.mark.slow), Counts, Tosses, Wrapped, Asks, Hooks])
def test_what_does_not_fit_trains_in_turn(kind: type[Tower]):
    sweep = check(Case(MIXED[:3], steps=8), made=lambda variant: make(variant, kind), plain=False)
    assert not sweep.forms.steps["fused"]


@pytest.mark.parametrize("kind", [Decays, Draws])
def test_gradients_and_random_numbers_come_in_their_order(kind: type[Tower]):
    sweep = check(Case(MIXED[:3], steps=8), made=lambda variant: make(variant, kind), plain=False)
    assert sweep.forms.steps["fused"] > 12


@pytest.mark.parametrize(
    ("kind", "dropped", "steps"), [(Anneals, None, 3 * 4), (Thaws, None, 3 * 4), (Anneals, 4, 3 * 4 + 2 * 6)]
)
def test_a_model_that_changes_trains_in_turn_from_then_on(kind: type[Anneals], dropped: int | None, steps: int):
    """Unless another leaves at the same step: what is left is probed anew."""

    def made(variant: Any) -> Any:
        model: Any = make(variant, kind)[0]
        return model, Says(model)

    one = MIXED[0]
    sweep = check(Case((one, replace(one, dropped=dropped), one), steps=12), made=made, plain=False)
    assert sweep.forms.steps["fused"] == steps, "the first step is a probe"


def test_a_loss_that_changes_unseen_ends_the_sweep(monkeypatch: pytest.MonkeyPatch):
    scale = [1.0]

    class Scaled(Tower):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * scale[0]

    def made(variant: Any) -> Any:
        model: Any = make(variant, Scaled)[0]
        model.changes = lambda: scale.__setitem__(0, 2.0)
        return model, Says(model)

    monkeypatch.setattr(fused, "AGAIN", 6)
    with pytest.raises(RuntimeError, match="compute something else than 5 steps ago"):
        check(Case(MIXED[:1] * 3, steps=12), made=made, plain=False)


def stacks_turned(self: Fused, each: Any, own: Any = Fused._inputs) -> Any:
    rows, *data = own(self, each)[self._own - 1 :]
    return [*own(self, each)[: self._own - 1], rows.roll(1, 0), *data]


def no_bias(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b) + bias


FAULTS: dict[str, Any] = {
    "a bias added after the product": lambda patch: patch.setitem(PRODUCTS, torch.ops.aten.addmm.default, no_bias),
    "a neighbour's rows": lambda patch: patch.setattr(Fused, "_inputs", stacks_turned),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch):
    """By the probe, which then fuses nothing that has it; and by the bits, were there none."""
    FAULTS[fault](monkeypatch)
    compare("dlrm-tiny", 3, 128)
    monkeypatch.setattr(fused, "same_bits", lambda a, b: True)
    with pytest.raises(AssertionError, match="lr="):
        compare("dlrm-tiny", 3, 128)


def test_a_shared_generator_is_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contender, "put_torch", lambda state: None)
    with pytest.raises(AssertionError):
        check(Case(MIXED[:3], steps=8), made=lambda variant: make(variant, Draws), plain=False)


def test_the_faster_form_is_taken_once_both_are_measured():
    for fused_seconds, faster in ((1.0, "fused"), (3.0, "loop")):
        choice = Group([], cast(Any, object()))
        forms = []
        for _ in range(MEASURED):
            forms.append(choice.form)
            choice.seconds[choice.form].append(2.0 if choice.form == "loop" else fused_seconds)
        assert forms == ["fused", "loop"] * 10 and choice.form == faster
        choice.seconds[faster] = [min(choice.seconds[faster]), *[9.0] * 9]  # other processes were busy
        assert choice.form == faster
    assert Group([]).form == "loop"


def test_a_layout_that_comes_once_is_not_probed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Of nine whole batches and a smaller one at the end."""
    monkeypatch.setattr(Forms, "only", None)
    probed, probe = list[int](), Forms._probed

    def counted(forms: Forms, racing: Any, batch: Any, layout: Any) -> Any:
        probed.append(len(batch.labels))
        return probe(forms, racing, batch, layout)

    monkeypatch.setattr(Forms, "_probed", counted)
    SweepCommand.of(**FLAGS | files(tmp_path, "csv"), vary=("lr=0.01,0.1",), run="none", processes=1).run()
    assert probed == [16]


def test_results_say_what_was_inexact(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused, "same_bits", lambda a, b: False)
    for inexact in (False, True):
        command = SweepCommand.of(
            data="synthetic:tiny", model="dlrm-tiny", dim=4, batch=16, steps=12, cache="20%", quiet=True,
            vary=("lr=0.02,0.5",), run="none", processes=1, inexact=inexact,
        )  # fmt: skip
        result = command.run()
        assert result["form"] == ("fused" if inexact else "loop") and result["exact"] == (not inexact)
        assert all(of["exact"] == (not inexact) for of in result["by_variant"].values())
        assert ("exact" in command.summary(result)) == inexact
