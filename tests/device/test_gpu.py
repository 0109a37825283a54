"""A cache on a GPU: the bits of the plain reference, on streams that are as late and as odd as their events allow.

The kernels run in Triton's interpreter, so this shows logic and hazards, not a GPU's arithmetic.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl import Adam, RowwiseAdagrad, Table
from tests.cases import cases
from tests.device.hazards import hazards
from tests.runs import Case, Part, Run
from tests.test_exact import cases_of

TABLES = (Table("a", 60, 3, features=("x", "y")), Table("b", 50_000_000, 5, pooling="mean"), Table("c", 40, 3))
BUSY = Case(
    TABLES, Adam(lr=0.05), (Part(0, 14, (9,)), Part(9, 14)), depth=3, weights=0.5, evaluate=0.2, device="interpret"
)


@given(cases_of(), st.sampled_from([0.0, 0.3, 0.7]))
@cases(20)
def test_every_bit_is_that_of_the_reference(case, eager):
    Run(replace(case, device="interpret", eager=eager)).go()


@pytest.mark.parametrize("eager", [0.0, 0.5])
@pytest.mark.parametrize("prefetch", [0, 4])
def test_rows_on_their_way_in_both_directions(eager, prefetch):
    case = replace(
        BUSY, optimizer=RowwiseAdagrad(lr=0.1), universe=12, prefetch=prefetch, eager=eager, slow_write=0.003
    )
    report = Run(case).go()
    assert report.forwarded and report.fetched > report.forwarded


@pytest.mark.parametrize("seed", range(3))
def test_every_order_that_the_pipeline_allows(seed):
    assert hazards(range(seed, seed + 1)) > 20
