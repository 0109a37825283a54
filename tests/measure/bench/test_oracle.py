"""The planner's benchmark: it times what it says, and counts what a run would move."""

import pytest

from skirl.data.synthetic import Synthetic
from skirl.measure.bench.oracle import Oracle
from tests.oracle import brute

SMALL = {"batch": 16, "depth": 4, "cache": 450, "steps": 6}


@pytest.mark.parametrize("ids", ["rows", "hashed64"])
@pytest.mark.parametrize("threads", [1, 3])
def test_it_counts_what_the_rule_says(ids, threads):
    result = Oracle(**SMALL, ids=ids, threads=threads).run()
    trace = [
        [t << 48 | row for t in range(26) for row in batch.sparse.values()[t * 16 : (t + 1) * 16].tolist()]
        for batch in Synthetic("criteo-kaggle", batch_size=16, batches=10, seed=0)
    ]
    ends = [min(n + 4, 10) for n in range(10)]
    timed = brute.victims(trace, 450, ends)[1:7]
    assert result["rows_a_batch"]["evicted"] == sum(map(len, timed)) / 6 > 0
    assert result["ids_per_s"] > 0 and result["ms_per_batch"] == pytest.approx(result["enter_ms"] + result["plan_ms"])


def test_a_wrong_flag_is_named():
    with pytest.raises(ValueError, match="threads is 0: set it to 1 or more"):
        Oracle(threads=0)
