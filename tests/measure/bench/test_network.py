"""`skirl bench network`: its measurements have the right bits; times are not tested."""

import json

import pytest
import torch

from skirl.engine.exchange import Exchange
from skirl.measure.bench import movement, network, shards_vs_whole, wire
from skirl.measure.bench.network import Network
from skirl.peers.job import using
from tests.peers.test_groups import start
from tests.threads_as_trainers import InProcess
from tests.warm import Python

PART = "import json, sys; from skirl.measure.bench.network import dense; print(json.dumps(dense(int(sys.argv[2][:-2]), 2)))"


def test_the_sum_has_the_bits_of_the_tree(python: Python, monkeypatch):
    def measured(count, part, numbers, rounds, *more):
        if part == "wire":
            return counted(count, numbers, rounds, *more)
        ranks = start(python, count, part, float(numbers), code=PART)
        said = []
        for rank in ranks:
            with rank:
                out, err = rank.communicate(60)
                assert rank.returncode == 0, err
                said.append(json.loads(out))
        return said

    monkeypatch.setattr(network, "_measured", measured)
    monkeypatch.setattr(shards_vs_whole, "shards_vs_whole", lambda batch, shards: {"shards_vs_whole": 1.0})
    task = movement.CountSettings
    monkeypatch.setattr(
        movement, "CountSettings", lambda *args, **more: task(*args, **more, cache=2000, rows_scale=0.001)
    )
    flags = Network(trainers=(2,), numbers=1001, rounds=2, batch=64, steps=3, counted=(4,), windows=(3,), samples=8)
    result = flags.run()
    assert result["dense"]["2"]["same_bits"] and result["dense_vs_allreduce"]["2"] > 0
    said = flags.summary(result)["2 trainers"]
    assert "of 1,001 dense gradients" in said and "the plan has" not in said
    assert 1 < result["wire_overhead"]["2"] < 1.2 and result["seed"] == 0
    assert result["rows_vs_allreduce"] == result["movement"]["4"]["rows_vs_allreduce"] > 0
    assert f"a ring all-reduce: {result['rows_vs_allreduce']:.2f}x" in flags.summary(result)["4 counted"]


def counted(count, *stream):
    """Run `count` trainers in threads, and return what each counted."""

    def work(peers):
        with using(peers):
            return wire.of_rank(*stream)

    return InProcess.run(count, work)


@pytest.mark.parametrize("trainers", [2, 4])
def test_vectors_that_travel_are_those_of_the_plan(trainers):
    stream = (32, 4, 8, trainers)
    facts = wire.overhead(counted(trainers, *stream), *stream)
    assert facts["as_planned"] and facts["vectors"] == facts["vectors_planned"] > 100


@pytest.mark.parametrize("times", [0, 2])
def test_a_swap_too_few_or_too_many_is_noticed(times, monkeypatch):
    values = Exchange.values

    def other(self, banks, work):
        for _ in range(times if work.number == 2 else 1):
            values(self, banks, work)
        if not work.values:
            work.values = {
                n: torch.zeros(reads.ask[-1], bank.facts.dim) for n, (reads, bank) in enumerate(zip(work.reads, banks))
            }

    monkeypatch.setattr(Exchange, "values", other)
    stream = (32, 4, 8, 0)
    assert not wire.overhead(counted(2, *stream), *stream)["as_planned"]


@pytest.mark.parametrize("count", [1, 3])
def test_trainers_without_a_tree_are_refused(count):
    with pytest.raises(ValueError, match="set it to powers of two, from 2 on"):
        Network(trainers=(count, 2))


def test_what_is_counted_is_checked():
    with pytest.raises(ValueError, match=r"counted is .* set it to numbers of trainers from 2 to 64"):
        Network(counted=(8, 65), windows=(2, 2))
    with pytest.raises(ValueError, match="set one of 1 or more for each"):
        Network(windows=(200,))
