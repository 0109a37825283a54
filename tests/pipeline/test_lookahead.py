"""The loop's side: what a for-loop over a lookahead sees, for every kind of loader."""

import gc
import weakref

import pytest
import torch

import skirl
from skirl import Batch, KeyedJagged
from tests.loops import (
    FEATURES,
    Broken,
    Replay,
    collection,
    endless,
    every_row,
    loop,
    our_threads,
    stream,
    train,
    wait_for,
)

STEPS = 24


@pytest.fixture(scope="module")
def data():
    return stream(STEPS)


def test_a_lookahead_can_be_opened_again(data):
    embeddings = collection()
    batches = skirl.lookahead(data[0], embeddings)
    for _ in range(2):
        with batches:
            assert loop(batches, embeddings) == STEPS
    Replay(data[1] * 2).check(embeddings, 2 * STEPS)


def accumulate(embeddings, data, k, stop=None, fail=None):
    with skirl.lookahead(data[0], embeddings, accumulate=k) as batches:
        for number, batch in enumerate(batches, start=1):
            train(embeddings, batch)
            if number == fail:
                raise Broken
            if number == stop:
                break
    return batches.step


def test_a_break_applies_the_micro_batches_that_came_back(data):
    embeddings = collection(cache="100%")
    accumulate(embeddings, data, 4, stop=6)
    assert embeddings.engine.packs[0].steps.tolist() == [2, 2, 2]


def test_an_error_drops_the_step_that_is_not_whole(data):
    embeddings, whole = collection(cache="100%"), collection(cache="100%")
    with pytest.raises(Broken):
        accumulate(embeddings, data, 4, fail=6)
    accumulate(whole, data, 4, stop=4)
    assert embeddings.engine.packs[0].steps.tolist() == [1, 1, 1]
    assert (every_row(embeddings) == every_row(whole)).all()


def test_making_a_lookahead_does_not_start_the_loader(data):
    class Loader:
        def __iter__(self):
            raise Broken

    for depth in ("auto", "epoch"):
        skirl.lookahead(Loader(), collection(), depth=depth)
    embeddings = collection()
    with pytest.raises(Broken), skirl.lookahead(Loader(), embeddings) as batches:
        iter(batches)
    assert embeddings.lookahead is None


def test_a_batch_that_cannot_be_copied(data):
    class Stubborn(Batch):
        def __deepcopy__(self, memo):
            raise Broken("not me")

    batch = data[0][0]
    loader = [Stubborn(batch.dense, batch.sparse, batch.labels)]
    embeddings = collection()
    with (
        pytest.raises(TypeError, match=r"a batch of type Stubborn cannot be copied \(not me\): .*yields_fresh = True"),
        skirl.lookahead(loader, embeddings) as batches,
    ):
        loop(batches, embeddings)


class Reusing:
    def __init__(self, batches, fresh):
        self.batches = batches
        self.yields_fresh = fresh

    def __iter__(self):
        dense = torch.zeros(2, 1)
        for number, batch in enumerate(self.batches):
            dense.fill_(number)
            yield Batch(dense, batch.sparse, batch.labels)


def test_batches_are_copied_unless_the_loader_yields_fresh_ones(data):
    for fresh in (False, True):
        embeddings = collection()
        with skirl.lookahead(Reusing(data[0], fresh), embeddings) as batches:
            numbers = [int(batch.dense[0, 0]) for batch in batches]
        assert (numbers == list(range(STEPS))) != fresh


def test_the_window_is_capped_by_what_its_batches_weigh(data):
    """Each holds 80 KB besides its ids, and the window may hold 400."""

    class Loader:
        read = 0

        def __iter__(self):
            for batch in endless(data[0]):
                self.read += 1
                yield Batch(torch.zeros(2, 10_000), batch.sparse, batch.labels)

    loader, embeddings = Loader(), collection(cache="100%")
    with skirl.lookahead(loader, embeddings, window_bytes=400_000, ramp=False) as batches:
        for batch in batches:
            train(embeddings, batch)
            assert loader.read - batches.step <= 5 + 4 + 3 + 2  # window, backlog, planned, ready
            if batches.step == 40:
                break


def test_nothing_of_a_step_is_kept_by_who_keeps_its_loss(data):
    embeddings, batches_seen, kept = collection(), [], []
    with skirl.lookahead(data[0], embeddings) as batches:
        for batch in batches:
            out = embeddings(batch.sparse)
            loss = sum(part.sum() for part in out.values())
            loss.backward()
            kept.append(loss)
            batches_seen.append(weakref.ref(batch))
            del batch, out, loss
    gc.collect()
    assert [number for number, seen in enumerate(batches_seen) if seen() is not None] == []
    with pytest.raises(RuntimeError):  # torch's error or ours: a graph is used once
        kept[-1].backward()


class Holder:
    """A user's trainer: its `sparse` holds the lookahead."""

    def __init__(self, batches):
        self.embeddings = collection()
        self.ahead = skirl.lookahead(batches, self.embeddings, sparse=self.pick).__enter__()

    def pick(self, batch):
        return batch.sparse


@pytest.mark.parametrize("closed", [True, False])
def test_a_lookahead_that_only_its_user_holds_goes_with_its_threads(data, closed):
    holder = Holder(data[0])
    next(iter(holder.ahead))
    assert our_threads()
    if closed:
        holder.ahead.close()
    gone = weakref.ref(holder.embeddings.engine)
    del holder
    gc.collect()
    wait_for(lambda: not our_threads())
    gc.collect()
    assert gone() is None


def test_a_batch_looked_up_alone_does_not_decide_the_split(data):
    """The lookahead splits the cache by its own window."""
    tried, fresh = collection(), collection()
    tiny = KeyedJagged(FEATURES, torch.zeros(4, dtype=torch.int64), lengths=torch.tensor([1, 1, 1, 1]))
    train(tried, Batch(torch.zeros(1, 1), tiny, torch.zeros(1)))
    assert len(tried.engine.caches) == 2
    for embeddings in (tried, fresh):
        with skirl.lookahead(data[0], embeddings) as ahead:
            loop(ahead, embeddings)
    assert [len(c) for c in tried.engine.caches] == [len(c) for c in fresh.engine.caches]
    assert tried.engine.capacity.split == fresh.engine.capacity.split


def test_ids_made_out_of_a_batch_count_as_memory(data):
    """Each of these batches takes 800 bytes itself and 800 for ids: three fill the window."""
    embeddings = skirl.EmbeddingBagCollection([skirl.Table("x", 100, 2)], optimizer=skirl.SGD(), cache=100)
    loader = [torch.arange(100)[:, None] for _ in range(40)]
    windows = []
    for sparse_of in (
        lambda ids: KeyedJagged(["x"], ids[:, 0], lengths=torch.ones(100, dtype=torch.int32)),
        lambda ids: KeyedJagged(["x"], ids[:, 0].clone(), lengths=torch.ones(100, dtype=torch.int32)),
    ):
        with skirl.lookahead(loader, embeddings, sparse=sparse_of, ramp=False, window_bytes=12_000) as ahead:
            for _ in ahead:
                windows.append(ahead.window)
                break
    assert all(0 < window < 10 for window in windows)
