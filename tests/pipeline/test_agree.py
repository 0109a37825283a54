"""Mistakes of several trainers, such as different dense weights or the same data on all: mistakes are noticed, and only
they."""

import logging
import threading
import time
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch

import skirl
from skirl.core.ids import BadIds
from skirl.core.placement import Placement
from skirl.engine.capacity import DoesNotFit
from skirl.oracle.route import FailedElsewhere
from skirl.peers.base import PeerError
from skirl.peers.job import using
from tests.threads_as_trainers import InProcess


def collection(peers, rows=99):
    with using(peers):
        return skirl.EmbeddingBagCollection([skirl.Table("a", rows, 4)], optimizer=skirl.SGD(lr=0.1), cache=90)


def loader_of(batches, seed, rows=99, samples=8):
    draw = torch.Generator().manual_seed(seed)
    return [
        skirl.KeyedJagged.one_hot(["a"], torch.randint(0, rows, (samples, 1), generator=draw)) for _ in range(batches)
    ]


def train(peers, *, same_data, dense=lambda rank: 0.5, rows=1000):
    """Train six steps of one trainer."""
    embeddings = collection(peers, rows)
    model = torch.nn.ModuleDict({"rows": embeddings, "top": torch.nn.Linear(4, 1)})
    with torch.no_grad():
        model["top"].weight.fill_(dense(peers.rank))
        model["top"].bias.fill_(0)
    loader = loader_of(6, 0 if same_data else peers.rank, rows, samples=32)
    with skirl.lookahead(loader, model, sparse=lambda ids: ids, depth=3) as batches:
        for ids in batches:
            model["top"](embeddings(ids)["a"]).sum().backward()
            model.zero_grad()


@pytest.mark.parametrize(("same_data", "rows", "told"), [(True, 1000, 1), (False, 1000, 0), (True, 1, 0)])
def test_the_same_data_on_all_trainers_is_said_once(same_data, rows, told, caplog):
    with caplog.at_level(logging.WARNING, "skirl"):
        InProcess.run(2, lambda peers: train(peers, same_data=same_data, rows=rows))
    said = [record for record in caplog.messages if "all trainers have read the same ids" in record]
    assert len(said) == told


def test_dense_weights_that_differ_are_refused_by_name():
    with pytest.raises(ValueError, match=r"top\.weight differs between ranks . and .: .* torch\.manual_seed\(0\)"):
        InProcess.run(3, lambda peers: train(peers, same_data=False, dense=lambda rank: 0.5 if rank < 2 else 0.25))


@pytest.mark.parametrize("depth", [1, 20])
def test_a_loop_that_all_leave_early_ends_and_may_begin_again(depth):
    def work(peers):
        embeddings = collection(peers)
        steps = []
        for stop in (3, 7):
            with skirl.lookahead(loader_of(30, peers.rank), embeddings, sparse=lambda ids: ids, depth=depth) as batches:
                for ids in batches:
                    time.sleep(0.003 * peers.rank)
                    embeddings(ids)["a"].sum().backward()
                    if batches.ends_step and batches.step == stop:
                        break
            steps.append(batches.step)
        return steps

    assert InProcess.run(3, work) == [[3, 7]] * 3


def left(peers, where):
    """Run a trainer that leaves its loop where it is told to, and return what it hears of that."""
    embeddings = collection(peers)
    try:
        with skirl.lookahead(loader_of(40, peers.rank), embeddings, sparse=lambda ids: ids, shards=4) as batches:
            for number, ids in enumerate(batches):
                embeddings(ids)["a"].sum().backward()
                if number == where.get(peers.rank):
                    break
    except RuntimeError as error:
        return str(error)


def test_a_loop_that_one_leaves_in_the_midst_of_a_step_is_said_by_all_at_once():
    said = InProcess.run(2, lambda peers: left(peers, {1: 6}))
    assert said[0] == said[1]
    assert said[0] == (
        "rank 1 left its loop in micro-batch 1 of step 4 while other trainers go on with that step: leave the loop only "
        "when batches.ends_step is true, after the same step on all trainers"
    )


def test_an_error_that_all_raise_on_purpose_ends_the_job_and_says_what_to_do_instead():
    there = threading.Barrier(2)

    def work(peers):
        embeddings = collection(peers)
        loader = [skirl.KeyedJagged.one_hot(["a"], torch.arange(8).reshape(8, 1) + i) for i in range(9)]
        with suppress(StopIteration), skirl.lookahead(loader, embeddings, sparse=lambda ids: ids) as batches:
            for ids in batches:
                embeddings(ids)["a"].sum().backward()
                if batches.step == 3:
                    there.wait(60)  # otherwise one trainer's error would end the other's step
                    raise StopIteration("enough")
        try:
            embeddings.rows("a", [1])
        except RuntimeError as error:
            return str(error)

    for said in InProcess.run(2, work):
        assert "ended the job: StopIteration('enough') (in step 3)" in said


def ended(peers, data, **options):
    """Train on the batches of this trainer, and return the steps begun and the error, if there was one."""
    with using(peers):
        embeddings = skirl.EmbeddingBagCollection(
            [skirl.Table("a", 40, 3), skirl.Table("b", 20, 4)],
            optimizer=skirl.SGD(lr=0.1),
            cache=options.pop("cache", 40),
        )
    batches = skirl.lookahead(data[peers.rank], embeddings, sparse=lambda ids: ids, **options)
    try:
        with batches as loop:
            for ids in loop:
                sum(out.sum() for out in embeddings(ids).values()).backward()
    except Exception as error:
        return batches.step, error
    return batches.step, None


def of_two(count):
    """Return the batches of two trainers, of few ids of two tables."""
    return [[skirl.KeyedJagged.of_bags({"a": [[n, 3 * n]], "b": [[n]]}) for n in range(count)] for _ in range(2)]


def test_trainers_end_with_the_first_that_has_no_more():
    data = of_two(12)
    del data[1][9:]
    assert InProcess.run(2, partial(ended, data=data, depth=4)) == [(9, None)] * 2


def refused(found, kind, said):
    """Check that rank 1 has an error of a kind, and that the others were told of it, by whoever told them first."""
    for rank, (_, error) in enumerate(found):
        with pytest.raises(kind if rank == 1 else (FailedElsewhere, PeerError), match=said):
            raise error or AssertionError


def test_an_id_out_of_range_ends_all():
    data = of_two(12)
    data[1][7] = skirl.KeyedJagged.of_bags({"a": [[40]], "b": [[1]]})
    said = r"^rank 1: batch 7, feature 'a', sample 0: id 40 is outside table 'a'"
    refused(InProcess.run(2, partial(ended, data=data)), BadIds, said)


@pytest.mark.parametrize("depth", [1, 20])
def test_a_batch_that_no_split_holds_ends_all(depth):
    own = [row for row in range(40) if Placement.even(2).site_of(np.array([row]))[0] == 1]
    data = of_two(14)
    data[0][10] = skirl.KeyedJagged.of_bags({"a": [own], "b": [[]]})
    found = InProcess.run(2, partial(ended, data=data, depth=depth, cache=len(own) - 1))
    refused(found, DoesNotFit, r"^rank 1: cache \d+ is \d+ rows, batch 10 needs \d+")
    assert max(steps for steps, _ in found) <= 10
