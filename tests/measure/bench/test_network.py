"""`skirl bench network`: what it measures has the bits that it should; times are not tested."""

import json

import pytest

from skirl.measure.bench import network
from skirl.measure.bench.network import Network
from tests.peers.test_groups import start
from tests.zygote import Python

PART = "import json, sys; from skirl.measure.bench.network import dense; print(json.dumps(dense(int(sys.argv[2][:-2]), 2)))"


def test_the_sum_has_the_bits_of_the_tree(python: Python, monkeypatch):
    def measured(count, part, numbers, rounds):
        ranks = start(python, count, part, float(numbers), PART)
        said = []
        for rank in ranks:
            with rank:
                out, err = rank.communicate(60)
                assert rank.returncode == 0, err
                said.append(json.loads(out))
        return said[0]

    monkeypatch.setattr(network, "_measured", measured)
    flags = Network(trainers=(2,), numbers=1001, rounds=2)
    result = flags.run()
    assert result["dense"]["2"]["same_bits"] and result["dense_vs_allreduce"]["2"] > 0
    assert "of 1,001 dense gradients" in flags.summary(result)["2 trainers"]


@pytest.mark.parametrize("count", [1, 3])
def test_trainers_without_a_tree_are_refused(count):
    with pytest.raises(ValueError, match="set it to powers of two, from 2 on"):
        Network(trainers=(count, 2))
