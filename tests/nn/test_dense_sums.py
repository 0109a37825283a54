"""When dense gradients are sent to other trainers. Their sums are tested by tests/pipeline/test_shards.py."""

import threading

import pytest
import torch

import skirl
from skirl import SGD
from skirl.engine.device.host import HostRows
from skirl.peers.dense import OfAllTrainers
from skirl.peers.job import using
from tests.pipeline.test_shards import TABLES, Model, draw
from tests.threads_as_trainers import InProcess


def doubled(weight):
    weight.grad.mul_(2)


def of_rank(peers, hooked):
    """Return the gradients of three steps of two shards. hooked: a user's hook doubles one of them."""
    with using(peers):
        embeddings = skirl.EmbeddingBagCollection(TABLES, optimizer=SGD(lr=0.1), cache=90, seed=7)
    model, found = Model(embeddings, dropout=0.0), []
    data = draw(3, 6)
    with skirl.lookahead([data[2 * step + peers.rank] for step in range(3)], model, shards=2) as batches:
        for step, batch in enumerate(batches):
            if hooked and step == 1:
                model.first.register_post_accumulate_grad_hook(doubled)
            model.loss(batch).backward()
            found.append([weight.grad for weight in (model.first, model.second, model.rare)])
            model.zero_grad()  # drops its own references to them
    return threading.get_ident(), found


@pytest.fixture
def told(monkeypatch):
    """Record, by thread, when dense gradients are sent and when rows are summed."""
    log = []
    for owner, name, what in ((OfAllTrainers, "start", "dense"), (HostRows, "sums", "rows")):
        real = getattr(owner, name)
        note = lambda *args, real=real, what=what: (log.append((threading.get_ident(), what)), real(*args))[1]  # noqa: E731
        monkeypatch.setattr(owner, name, note)
    return log


def test_they_leave_before_rows_are_summed(told):
    """Except when a user's hook may still change them: then each trainer gets the hook's result."""
    plain = InProcess.run(2, lambda peers: of_rank(peers, False))
    assert_order(told, plain, ["dense first"] * 3)
    told.clear()
    hooked = InProcess.run(2, lambda peers: of_rank(peers, True))
    assert_order(told, hooked, ["dense first", "rows first", "rows first"])
    for (_, ours), (_, theirs) in zip(hooked, plain):
        for step in range(3):
            assert torch.equal(ours[step][0], theirs[step][0] * (2 if step else 1))
            assert all(map(torch.equal, ours[step][1:], theirs[step][1:]))


def assert_order(log, ranks, expected):
    for thread, _ in ranks:
        mine = [what for who, what in log if who == thread]
        each = len(mine) // 3
        assert set(mine) == {"dense", "rows"} and len(mine) == 3 * each
        assert [f"{mine[each * step]} first" for step in range(3)] == expected
