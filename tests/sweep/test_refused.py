"""Mistakes that a sweep refuses, with one sentence each."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import skirl
from skirl import SGD, KeyedJagged, Sweep, Table, Variant
from skirl.engine.capacity import DoesNotFit
from skirl.sweep.sweep import Diverged

TABLE = Table("a", 20, 2)
BATCHES = [KeyedJagged.one_hot(["a"], torch.tensor([[i], [i + 1], [i + 2]])) for i in range(6)]
"""A batch is copied before the loop gets it."""
TWO = (Variant("one", {"lr": 0.1}), Variant("two", {"lr": 0.2}))


class Net(nn.Module):
    def __init__(self, embeddings: Any, head: nn.Module | None = None) -> None:
        super().__init__()
        self.embeddings, self.head = embeddings, head or nn.Linear(embeddings.tables[0].dim, 1)

    def loss(self, ids: Any) -> torch.Tensor:
        return self.head(self.embeddings(ids)["a"]).sum()


def net(variant: Any) -> Net:
    return Net(variant.embeddings)


def made(make: Any = net, variants: Any = TWO, **options: Any) -> Sweep:
    return Sweep(make, variants, [TABLE], **{"cache": 10, "optimizer": SGD(), **options})


def ahead(sweep: Sweep, **options: Any) -> Any:
    return skirl.lookahead(BATCHES, sweep, sparse=lambda ids: ids, **options)


def train(variant: Any, ids: Any) -> None:
    loss = variant.model.loss(ids)
    loss.backward()
    variant.step(loss)


def fails(variant: Any) -> Net:
    raise ValueError("no such layer")


SHARED = nn.Linear(2, 1)
FIRST: list[Net] = []
"""The module of a sweep's first variant."""


def same_module(variant: Any) -> Net:
    if variant.name == "one":
        FIRST[:] = [Net(variant.embeddings)]
    return FIRST[0]


def with_one_optimizer(variant: Any) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(variant.embeddings)
    if variant.name == "one":
        OPTIMIZER[:] = [torch.optim.SGD(model.head.parameters(), lr=0.1)]
    return model, OPTIMIZER[0]


OPTIMIZER: list[torch.optim.Optimizer] = []
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"variants": []}, "a sweep has no variants: give it at least one"),
    ({"variants": [TWO[0], TWO[0]]}, "two variants are called 'one': give each another name"),
    ({"variants": [Variant("x", {"lr": -1.0})]}, "variant 'x': SGD: lr is -1.0, set it to"),
    ({"variants": [Variant("x", {"optimizer": {"b": SGD()}})]}, "variant 'x': optimizer has no pattern for table 'a'"),
    ({"variants": [Variant("x", {"optimizer": 3})]}, "variant 'x': optimizer is a int"),
    ({"variants": [Variant("x", {"tables": [Table("a", 30, 2)]})]}, "variant 'x': its tables differ from those of the"),
    ({"variants": [Variant("x", {"seed": -1})]}, "variant 'x': seed is -1"),
    ({"threads": 0}, "threads is 0: set it to 1 or more"),
    ({"make": fails}, "no such layer"),
    ({"make": lambda v: None}, "make_model gave a NoneType for variant 'one': return a torch.nn.Module over"),
    ({"make": lambda v: (net(v), [torch.optim.SGD])}, "make_model gave a Net with a list for variant 'one'"),
    ({"make": with_one_optimizer}, "make_model gave variants 'one' and 'two' the same optimizer"),
    ({"make": lambda v: nn.Linear(2, 1)}, "the model of variant 'one' has no embeddings: make it over"),
    ({"make": same_module}, "the model of variant 'two' has other embeddings"),
    ({"make": lambda v: Net(v.embeddings, SHARED)}, "variants 'one' and 'two' the same weights"),

]  # fmt: skip


@pytest.mark.parametrize(("options", "says"), REFUSED)
def test_a_sweep_that_cannot_be_made(options, says):
    with pytest.raises((ValueError, TypeError), match=re.escape(says)) as caught:
        made(**options)
    if options.get("make") is fails:
        assert caught.value.__notes__ == ["make_model was called for variant 'one'"]


def skips(sweep: Sweep, ids: Any) -> None:
    for variant in sweep:
        train(variant, ids)
        break


def goes_on(sweep: Sweep, ids: Any) -> None:
    for variant in sweep:
        if variant.name == "one":
            train(variant, ids)


def twice(sweep: Sweep, ids: Any) -> None:
    for variant in sweep:
        loss = variant.model.loss(ids)
        loss.backward()
        variant.step(loss)
        variant.step(loss)


def mixes(sweep: Sweep, ids: Any) -> None:
    for variant, each in zip(sweep, (ids, BATCHES[2])):
        train(variant, each)


def changes(sweep: Sweep, ids: Any) -> None:
    for variant in sweep:
        train(variant, ids)
        ids.values()[0] += 1


def no_step(sweep: Sweep, ids: Any) -> None:
    for variant in sweep:
        if variant.name == "two":
            variant.model.loss(ids).backward()
            break
        train(variant, ids)


def others_turn(sweep: Sweep, ids: Any) -> None:
    for _ in sweep:
        train(sweep["two"], ids)


def drops_all(sweep: Sweep, ids: Any) -> None:
    sweep.drop("one")
    sweep.drop("two")


def opens_one(sweep: Sweep, ids: Any) -> None:
    with skirl.lookahead(BATCHES, sweep["one"].model, sparse=lambda ids: ids):
        pass


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (skips, "the loop left a batch that 'one' was trained on without a step of variant 'two': call"),
        (no_step, "the loop left a batch that 'one' was trained on without a step of variant 'two'"),
        (goes_on, "the loop left a batch that 'one' was trained on without a step of variant 'two'"),
        (twice, "variant 'one' is stepped twice on one batch"),
        (mixes, "forward takes the batch that the lookahead yielded last, unchanged, and got other ids of feature"),
        (changes, "forward takes the batch that the lookahead yielded last, unchanged, and got other ids of feature 'a'"),
        (others_turn, "variant 'two' is trained outside of its turn"),
        (drops_all, "variant 'two' is the last of the sweep: leave the loop to end it"),
        (lambda sweep, ids: sweep.drop("three"), "no variant 'three': there are 'one', 'two'"),
        (opens_one, "variant 'one' has the plan of its sweep: pass the sweep to skirl.lookahead(loader, sweep)"),
    ],
)  # fmt: skip
def test_a_wrong_loop(body, says):
    with (
        pytest.raises((RuntimeError, ValueError, KeyError), match=re.escape(says)),
        made() as sweep,
        ahead(sweep) as batches,
    ):
        for ids in batches:
            body(sweep, ids)


def test_nothing_is_trained_without_a_lookahead():
    with made() as sweep:
        with pytest.raises(RuntimeError, match=r"no batch is in the loop: call sweep\.step"):
            sweep.step(BATCHES[0])
        with ahead(sweep), pytest.raises(RuntimeError, match="no batch is in the loop"):
            sweep.step(BATCHES[0])
        assert len(sweep.engine.store) == 0


def test_a_batch_that_no_variant_takes_is_left_out():
    with made() as sweep, ahead(sweep) as batches:
        for number, ids in enumerate(batches):
            if number % 2:
                sweep.step(ids)
    assert [v.embeddings.pack.steps.tolist() for v in sweep.variants] == [[3], [3]]


def test_shards_are_refused():
    with made() as sweep, pytest.raises(ValueError, match="steps of a sweep have one shard"):
        ahead(sweep, shards=2)


@pytest.mark.parametrize("cache", [2, "40B"])
def test_a_cache_without_room_for_one_batch_of_every_variant(cache):
    with made(cache=cache, variants=[TWO[0], Variant("wide", {"dim": 7})]) as sweep, ahead(sweep) as batches:
        with pytest.raises(DoesNotFit, match=r"batch 0 needs .*set cache to (\d+)") as caught:
            next(iter(batches))
        enough = re.search(r"set cache to (\d+)", str(caught.value))[1]  # type: ignore[index]
    enough = int(enough) if isinstance(cache, int) else f"{enough}B"
    with made(cache=enough, variants=[TWO[0], Variant("wide", {"dim": 7})]) as sweep, ahead(sweep) as batches:
        for ids in batches:
            sweep.step(ids)
        if isinstance(cache, str):  # all of it, for both
            capacity = sweep.engine.capacity
            counts = [zip(part, sweep.engine.record_bytes, strict=True) for part in capacity.split]
            assert sum(rows * width for part in counts for rows, width in part) <= int(str(enough)[:-1])


def test_variants_that_diverge_leave_and_the_last_one_ends_the_sweep(caplog):
    class Fails(Net):
        def loss(self, ids: Any) -> torch.Tensor:
            return super().loss(ids) / (0.0 if self.embeddings.engine.counters.steps >= self.at else 1.0)

    def make(variant: Any) -> Fails:
        model = Fails(variant.embeddings)
        model.at = variant.overrides["at"]
        return model

    variants = [Variant("one", {"at": 2}), Variant("two", {"at": 4})]
    with (
        pytest.raises(Diverged, match=re.escape("all variants have diverged, the last one ('two') in step 4")),
        made(make, variants) as sweep,
        ahead(sweep) as batches,
    ):
        for ids in batches:
            sweep.step(ids)
    assert sweep["one"].left == "diverged in step 2" and "variant 'one' has diverged" in caplog.text
