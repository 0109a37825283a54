"""The queues of a pass: bounded, in order, and free at the end."""

import threading
import time

import pytest

import skirl
from skirl.pipeline.pipeline import BACKLOG
from tests.loops import Hang, ProbedStore, Replay, collection, endless, hooked, stream, train


class Counting:
    def __init__(self, batches):
        self.batches = batches
        self.read = 0

    def __iter__(self):
        for batch in self.batches:
            self.read += 1
            yield batch


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_rows_travel_as_many_steps_ahead_as_prefetch_says(prefetch):
    ahead = []
    embeddings = collection(cache="100%")
    fetched = []
    note = lambda stage, n: fetched.append(n) if stage == "fetch" else None  # noqa: E731
    with hooked(note, stream(30)[0], embeddings, prefetch=prefetch) as batches:
        for batch in batches:
            time.sleep(0.01)
            ahead.append(len(fetched) - batches.step)
            train(embeddings, batch)
    assert max(ahead) == prefetch


@pytest.mark.parametrize("depth", [1, 5, "auto"])
def test_a_stuck_fetch_bounds_what_is_read_of_the_loader(depth):
    store, hang = ProbedStore(), Hang(5)
    store.on_read = hang
    loader = Counting(endless(stream(20)[0]))
    embeddings, reads = collection(store), []

    def look():
        hang.reached.wait(20)
        time.sleep(0.4)
        reads.append(loader.read)
        time.sleep(0.4)
        reads.append(loader.read)
        hang.go.set()

    watcher = threading.Thread(target=look)
    watcher.start()
    with skirl.lookahead(loader, embeddings, depth=depth) as batches:
        for batch in batches:
            train(embeddings, batch)
            if reads:
                break
    watcher.join()
    assert reads[0] == reads[1]  # all stages are idle
    window = 8 + 2 * batches.step if depth == "auto" else depth
    assert reads[1] <= batches.step + window + BACKLOG + 2 * 3 + 2


@pytest.mark.parametrize("slow", ["read", "write"])
@pytest.mark.parametrize("cache", [26, "2500B"])
def test_rows_on_their_way_are_bounded_by_staging(slow, cache):
    store = ProbedStore()
    setattr(store, f"on_{slow}", lambda number: time.sleep(0.003))
    embeddings = collection(store, cache=cache)
    batches, bags = stream(40)
    with skirl.lookahead(batches, embeddings, prefetch=3) as ahead:
        for batch in ahead:
            pipeline, engine = ahead._pipeline, embeddings.engine
            largest = max(len(b.sparse.values()) for b in batches)
            for bank, half in enumerate(engine.capacity.halves):
                assert pipeline._fetched_rows[bank] <= max(half, largest)
                assert pipeline._unwritten_rows[bank] <= max(half, largest)
            train(embeddings, batch)
    assert engine.counters.fetched > 20
    Replay(bags).check(embeddings, 40)


def test_draining_waits_for_writes_in_progress():
    store, hang = ProbedStore(), Hang(6)
    store.on_write = hang
    embeddings, drained = collection(store), []
    with skirl.lookahead(stream(40)[0], embeddings) as batches:
        for batch in batches:
            train(embeddings, batch)
            if hang.reached.is_set():
                threading.Timer(0.3, hang.go.set).start()
                batches.drain()
                drained.append(hang.go.is_set())
                assert not any(batches._pipeline._unwritten_rows)
                break
    assert drained == [True]


def test_no_buffer_is_held_by_a_step_that_is_done():
    embeddings, works = collection(), []
    with skirl.lookahead(stream(20)[0], embeddings) as batches:
        for batch in batches:
            train(embeddings, batch)
            works += batches._in_loop.works
            assert sum(len(leaving) for bank in embeddings.engine.banks for leaving in bank._pending.values()) <= sum(
                embeddings.engine.capacity.split.staging_rows
            )
    assert len(works) == 20 and all(not work.fetched for work in works)
