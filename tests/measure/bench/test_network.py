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
    flags = Network(trainers=(3,), numbers=1001, rounds=2)
    result = flags.run()
    assert result["dense"]["3"]["same_bits"] and result["dense_vs_allreduce"]["3"] > 0
    assert "of 1,001 dense gradients" in flags.summary(result)["3 trainers"]


def test_one_trainer_has_nothing_to_exchange():
    with pytest.raises(ValueError, match="set it to numbers of 2 or more"):
        Network(trainers=(1, 2))
