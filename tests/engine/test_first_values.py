"""Rows that begin from an array or a file have the bits of the plain reference, whatever happens to them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import skirl
from skirl import Adagrad, Adam, Constant, RowwiseAdagrad, Table
from tests.runs import Case, Part, Run

TABLES = (
    Table("a", 60, 3, features=("x", "y"), init=np.arange(180, dtype=np.float32).reshape(60, 3) / 7),
    Table("b", 40, 5, pooling="mean", init=-np.arange(200, dtype=np.float32).reshape(40, 5) / 9),
    Table("c", 40, 3, pooling="mean", init=Constant(0.0)),
)
AHEAD_AND_ALONE = Case(
    TABLES, Adagrad(lr=0.1, initial_accumulator_value=0.1), (Part(0, 14, (9,)), Part(9, 14), Part(0, 4, alone=True)),
    depth=3, evaluate=0.2, weights=0.5, universe=30,
)  # fmt: skip
CASES = {
    "through a lookahead, alone and into others": AHEAD_AND_ALONE,
    "the whole epoch known": Case(
        TABLES, Adam(lr=0.05), (Part(0, 14, (None, None)),), depth="epoch", accumulate=2, use="some", lost=0.3,
        fresh=False, universe=12,
    ),
    "another policy": Case(TABLES, RowwiseAdagrad(lr=0.1), (Part(0, 14),), policy="lru", prefetch=5, lost=0.2),
    "unpooled": Case(TABLES, Adam(lr=0.05), (Part(0, 10),), unpooled=True, use="some", accumulate=3),
    "slow writes": Case(TABLES, Adam(lr=0.05), (Part(0, 24),), slow_write=0.005, universe=40, spare=3, prefetch=5),
    "on a GPU's streams": replace(AHEAD_AND_ALONE, parts=(Part(0, 5, (3,)),), device="interpret", eager=0.3),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_bit_is_that_of_the_reference(case: Case) -> None:
    report = Run(case).go()
    assert report.fetched


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_half_precision_begin_from_an_array(dtype: torch.dtype) -> None:
    weight = torch.arange(40).view(10, 4) / 8
    for given in (weight, weight.to(dtype)):
        embeddings = skirl.EmbeddingBagCollection(
            [Table("a", 10, 4, init=given)], optimizer=skirl.SGD(lr=0.5), cache=3, dtype=dtype, device="interpret"
        )
        assert torch.equal(embeddings.rows("a", range(10)), weight)
        ids = skirl.KeyedJagged.one_hot(["a"], torch.tensor([[7], [2]]))
        out = embeddings(ids)["a"]
        assert torch.equal(out.float(), weight[[7, 2]])
        out.sum().backward()
        expected = weight.clone()
        expected[[7, 2]] -= 0.5
        embeddings.set_rows("a", [3], weight[:1].to(dtype))
        expected[3] = weight[0]
        assert torch.equal(embeddings.rows("a", range(10)), expected)
