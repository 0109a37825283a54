"""The engine: its counters, the rows it holds, and its errors when rows are lost."""

import tempfile
from dataclasses import replace

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import skirl
from skirl.checkpoint import numbers
from tests.cases import cases
from tests.loops import CACHE, OPTIMIZER, TABLES, ProbedStore, collection, every_row, loop, stream, train


def test_counters_are_those_of_the_store():
    store = ProbedStore()
    embeddings = collection(store)
    moved = {"read": 0, "written": 0}
    read, write = store.read, store.write

    def count_read(keys, out):
        moved["read"] += len(keys)
        return read(keys, out)

    def count_write(keys, rows):
        moved["written"] += len(keys)
        return write(keys, rows)

    store.read, store.write = count_read, count_write  # type: ignore[method-assign]
    with skirl.lookahead(stream(30)[0], embeddings) as batches:
        loop(batches, embeddings)
    counters = embeddings.engine.counters
    assert counters.steps == 30
    assert counters.fetched - counters.forwarded == moved["read"] > 0
    assert counters.written == moved["written"] > 0
    assert counters.new == len(embeddings.engine.seen)
    assert counters.bytes_written >= 24 * counters.written


ACTS = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 6)),
    st.tuples(st.just("leave"), st.integers(1, 3)),  # before the last step's forward: its rows came, and none changed
    st.tuples(st.sampled_from(["alone", "set", "freeze", "unfreeze", "flush", "save", "load", "drop"]), st.just(1)),
)


def act(embeddings: skirl.EmbeddingBagCollection, what: str, count: int, seed: int, folder: str) -> None:
    batches = stream(count, seed)[0]
    if what in ("train", "leave"):
        with skirl.lookahead(batches, embeddings, depth=2) as ahead:
            for batch in ahead:
                if what == "leave" and ahead.step == count:
                    break
                train(embeddings, batch)
    elif what == "alone":
        train(embeddings, batches[0])
    elif what == "set":
        embeddings.set_rows("a", range(0, 40, 3), torch.full((14, 3), float(seed)))
    elif what in ("freeze", "unfreeze"):
        getattr(embeddings, what)("b", "c")
    elif what == "flush":
        embeddings.flush()
    elif what == "save":
        skirl.save(folder, model=embeddings)
    elif what == "load" and numbers(folder):
        try:
            skirl.load(folder, model=embeddings)
        except skirl.CheckpointError as error:  # all or nothing
            assert ".frozen = " in str(error)
    elif what == "drop":
        embeddings.engine.drop_caches()


def check_flush(embeddings: skirl.EmbeddingBagCollection) -> None:
    """Assert that after a flush all resident rows are in the store as they are, and that another one writes nothing."""
    engine = embeddings.engine
    embeddings.flush()
    for bank, cache in zip(engine.banks, engine.caches, strict=False):
        resident = cache.resident()
        records = np.empty((len(resident.keys), bank.facts.width), np.float32)
        assert engine.store.read(resident.keys, records).all()
        assert records.tobytes() == bank.read(resident.slots.astype(np.int64)).tobytes()
        assert not len(cache.unwritten)


def check_acts(acts: list[tuple[str, int]], device: str) -> None:
    tables = (*TABLES[:2], replace(TABLES[2], init=np.arange(80, dtype=np.float32).reshape(20, 4)))
    embeddings = skirl.EmbeddingBagCollection(tables, optimizer=OPTIMIZER, cache=CACHE, device=device)
    with tempfile.TemporaryDirectory() as folder:
        for seed, (what, count) in enumerate(acts):
            act(embeddings, what, count, seed, folder)
        check_flush(embeddings)


@given(st.lists(ACTS, min_size=2, max_size=10))
@example([("train", 3), ("freeze", 1), ("flush", 1), ("train", 6)])
@example([("train", 3), ("save", 1), ("freeze", 1), ("load", 1)])
@example([("train", 3), ("save", 1), ("alone", 1), ("load", 1), ("leave", 2), ("alone", 1)])
@cases(60)
def test_a_flush_leaves_the_store_as_if_it_wrote_every_row(acts):
    check_acts(acts, "cpu")


@given(st.lists(ACTS, min_size=2, max_size=6))
@cases(4)
def test_a_flush_of_a_gpu_leaves_the_store_as_if_it_wrote_every_row(acts):
    check_acts(acts, "interpret")


def test_a_flush_writes_only_rows_that_the_store_lacks():
    store = ProbedStore()
    embeddings = collection(store, cache="100%")
    with skirl.lookahead(stream(30)[0], embeddings) as batches:
        loop(batches, embeddings)
    embeddings.flush()
    before, written, write = every_row(embeddings), [], store.write
    store.write = lambda keys, rows: (written.append(len(keys)), write(keys, rows))[1]  # type: ignore[method-assign]
    embeddings.eval()(stream(1, seed=3)[0][0].sparse)
    embeddings.train().flush()
    assert not written
    with skirl.lookahead(stream(1, seed=1)[0], embeddings) as batches:
        loop(batches, embeddings)
    embeddings.flush()
    changed = np.count_nonzero(before != every_row(embeddings))
    assert changed and 0 < sum(written) <= 16  # a step has at most 12 rows of dim 3 and 4 of dim 4
