"""Which trainer looks which table up for all: bytes counted one by one, plans, and what is refused."""

import json

import numpy as np
import pytest
import torch

import skirl
from skirl.cli.train import Train
from skirl.peers.job import using
from skirl.train.placed import count, dealt, evenly, placement_of, read
from tests.threads_as_trainers import InProcess

TABLES = [skirl.Table("a", 30, 4, features=("x", "y")), skirl.Table("b", 90, 8)]


def draw(seed, samples=12):
    rng = np.random.default_rng(seed)
    bags = {f: [rng.integers(0, 30, rng.integers(0, 6)).tolist() for _ in range(samples)] for f in ("x", "y", "b")}
    return bags, skirl.KeyedJagged.of_bags(bags)


@pytest.mark.parametrize("trainers", [2, 3])
def test_bytes_are_those_counted_one_by_one(trainers):
    drawn = [draw(seed) for seed in range(3)]
    found = count([ids for _, ids in drawn], TABLES, trainers)
    for table in TABLES:
        rows = whole = each = 0
        for bags, _ in drawn:
            for rank in range(trainers):
                own = [bags[f][rank * 12 // trainers : (rank + 1) * 12 // trainers] for f in table.features]
                ids = [i for feature in own for bag in feature for i in bag]
                rows += len({*ids}) * (4 + 8 * table.dim)  # its number, its values, its gradient
                each += len(ids) * 4 + sum(map(len, own))  # ids and lengths
                whole += len(ids) * 4 + sum(map(len, own)) * (1 + 8 * table.dim)  # these, and vectors both ways
        share = (trainers - 1) / trainers / len(drawn)  # what a trainer needs of its own does not travel
        assert found[table.name][0] == pytest.approx((rows * share, whole * share, each * share))


@pytest.mark.parametrize(("dim", "trainers"), [(16, 3), (7, 2), (6, 8), (4, 4), (2, 2), (3, 2)])
def test_columns_are_cut_at_even_numbers_of_them(dim, trainers):
    found = evenly(dim, trainers)
    if dim < 4:
        assert found == 0
    else:
        assert sum(found.values()) == dim and len(found) == min(trainers, dim // 2)
        assert not any(count % 2 for count in [*found.values()][:-1])
        assert max(found.values()) - min(found.values()) <= 3


def test_tables_are_dealt_by_their_load():
    assert dealt({"a": 5.0, "b": 3.0, "c": 2.0, "d": 1.0}, 2) == {"a": 0, "b": 1, "c": 1, "d": 0}


def test_a_run_takes_what_moves_fewer_bytes():
    flags = {"data": "synthetic:sessions", "model": "dlrm-tiny", "dim": 4, "batch": 32, "steps": 2, "shards": 2}
    chosen = placement_of(Train.of(**flags, placement="auto").recipe, 2)
    assert chosen and {*chosen.values()} <= {0, 1}
    assert (
        placement_of(Train.of(**flags, placement="rows").recipe, 2) == placement_of(Train.of(**flags).recipe, 1) == {}
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trainers": 3}, "a plan for 3 trainers, and there are 2"),
        ({"tables": [{"name": "a", "trainer": 0}]}, "a plan for other tables"),
        ({"tables": [{"name": "a", "trainer": 2}, {"name": "b", "trainer": None}]}, "table 'a' at 2: name trainers by"),
        ({"tables": [{"name": "a", "trainer": {"0": 2, "2": 2}}, {"name": "b", "trainer": 0}]}, "numbers below 2"),
        ({"tables": [{"name": "a", "trainer": {"0": 4, "1": 0}}, {"name": "b", "trainer": 0}]}, "and columns above 0"),
        ({"tables": [{"name": name, "trainer": 0} for name in "abb"]}, "places table 'b' twice"),
        ({"format": "other"}, "is no plan of tables for trainers"),
        ({"format": "skirl-table-plan"}, "a plan for TorchRec: make one by skirl place --trainers 2"),
        ({"tables": "none"}, "is damaged"),
    ],
)  # fmt: skip
def test_another_plan_is_refused(tmp_path, change, said):
    path = tmp_path / "plan.json"
    plan = {"format": "skirl-placement", "format_version": 1, "trainers": 2}
    plan["tables"] = [{"name": "a", "trainer": 1}, {"name": "b", "trainer": None}]
    path.write_text(json.dumps(plan))
    assert read(path, TABLES, 2) == {"a": 1}
    path.write_text(json.dumps(plan | change))
    with pytest.raises(ValueError, match=said):
        read(path, TABLES, 2)


@pytest.mark.parametrize(
    ("placement", "said"),
    [({"c": 0}, "has table 'c', and the tables are a, b"), ({"a": 2}, "has table 'a' at trainer 2 of 2")],
)
def test_a_placement_of_other_tables_or_trainers_is_refused(placement, said):
    def made(peers):
        with using(peers):
            skirl.EmbeddingBagCollection(TABLES, optimizer=skirl.SGD(lr=0.1), cache=9, placement=placement)

    with pytest.raises(ValueError, match=said):
        InProcess.run(2, made)


def test_weights_made_in_the_loop_are_refused():
    def train(peers):
        with using(peers):
            rows = skirl.EmbeddingBagCollection(TABLES, optimizer=skirl.SGD(lr=0.1), cache=90, placement={"a": 1})
        ids = draw(peers.rank)[1]
        with skirl.lookahead([ids], rows, sparse=lambda ids: ids, shards=2) as batches:
            for batch in batches:
                weights = torch.ones(len(batch.values()), requires_grad=True)
                rows(skirl.KeyedJagged(batch.keys(), batch.values(), weights=weights, offsets=batch.offsets()))

    with pytest.raises(ValueError, match="leave placement out"):
        InProcess.run(2, train)
