"""The parts of a stream that trainers read: together all of it, sample by sample, and nothing twice."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import Sampler

import skirl
from skirl.core.batch import Batch
from skirl.data import DataFlags, Source, Synthetic
from skirl.data.share import block
from tests.cases import cases
from tests.data import logs

ROWS = 304
COLUMNS = ["y", "age", "item", "seen"]
Sample = tuple[Any, ...]


SCHEMA = """
[[label]]
name = "y"
[[dense]]
name = "age"
transform = "log"
[[id]]
name = "item"
type = "int"
[[id]]
name = "seen"
list = true
separator = "|"
[file]
columns = ["y", "age", "item", "seen"]
delimiter = "tab"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shares")
    (folder / "s.toml").write_text(SCHEMA)
    rows = [[str(i % 3 % 2), str(i), str(i * i % 97), "|".join("abcdefg"[: i % 5])] for i in range(ROWS)]
    logs.write_in_three_forms(folder, rows, (0, 90, 91, 260, ROWS), names=COLUMNS, group=30)
    return folder


def opened(path: Path, batch: int, *, part_bytes: int = 700, **flags: Any) -> Source:
    stream = DataFlags(f"csv:{path}", batch=batch, rows="500", schema=str(path.parent / "s.toml"), **flags)
    return stream.stream() if flags.get("vocab") else stream.files(part_bytes)


def samples_of(batch: Batch) -> list[Sample]:
    """Return each sample by itself, without anything else from its batch."""
    n = len(batch.labels)
    lengths = batch.sparse.lengths().tolist()
    bags = [tuple(bag.tolist()) for bag in batch.sparse.values().split(lengths)]
    of = [tuple(bags[b::n]) for b in range(n)]
    return list(zip(batch.labels.tolist(), map(tuple, batch.dense.tolist()), of))


def chained(parts: Iterable[list[Sample]]) -> list[Sample]:
    return list(itertools.chain.from_iterable(parts))


def place_of(stream: Source) -> Any:
    """Return the numbers in a stream's state, without a vocabulary's arrays."""
    state = stream.state_dict()
    return (state["files"], state["since"]) if "tables" in state else state


def check_shards(stream: Source, batch: int, of: int, ranks: int) -> None:
    """Check that the shards of all trainers, joined batch by batch, equal the batches of one, and positions agree."""
    places, expected = [place_of(stream)], []
    for whole in stream:
        places.append(place_of(stream))
        expected.append(samples_of(whole))
    kept = expected if of == 1 else [samples for samples in expected if len(samples) == batch]
    found: list[list[list[Sample]]] = []
    for rank in range(ranks):
        first, last = block(rank, ranks, of)
        mine = stream.sharded(first, last, of)
        here: list[list[Sample]] = []
        for number, micro in enumerate(mine, start=1):
            here.append(samples_of(micro))
            if place_of(mine) != places[0] and len(expected) == len(kept):
                assert place_of(mine) == places[number // (last - first)]
        assert mine.steps == len(kept)
        assert {len(part) for part in here} <= {batch // of} or of == 1
        found.append([chained(here[k : k + last - first]) for k in range(0, len(here), last - first)])
    assert [chained(parts) for parts in zip(*found, strict=True)] == kept


@given(st.data(), st.sampled_from([1, 2, 4, 8]), st.integers(1, 8), st.booleans())
@cases(15)
def test_the_shards_of_all_trainers_are_the_synthetic_batch(
    data: st.DataObject, of: int, each: int, bags: bool
) -> None:
    stream = Synthetic("tiny", of * each, batches=3, pooling_factor=1 + 2 * bags)
    check_shards(stream, of * each, of, data.draw(st.integers(1, of)))


@given(
    st.sampled_from(["text", "packed", "parquet"]), st.data(), st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 30),
    st.sampled_from([0, 70]), st.booleans(),
)  # fmt: skip
@cases(25)
def test_the_shards_of_all_trainers_are_the_batches_of_files(
    folder: Path, name: str, data: st.DataObject, of: int, each: int, shuffle: int, skip: bool
) -> None:
    flags: dict[str, Any] = {"shuffle": shuffle, "epochs": data.draw(st.integers(1, 2)), "seed": 3}
    if data.draw(st.booleans()):
        flags["valid"] = "15%"
    flags |= {"bad_rows": "skip"} if skip else {"steps": 2} if flags["epochs"] == 1 and data.draw(st.booleans()) else {}
    stream = opened(folder / name, of * each, part_bytes=data.draw(st.sampled_from([150, 900])), **flags)
    check_shards(stream, of * each, of, data.draw(st.integers(1, of)))


@given(st.sampled_from(["text", "parquet"]), st.integers(1, 5), st.integers(1, 70), st.booleans())
@example("text", 4, 100, False)
@cases(15)
def test_the_batches_dealt_to_all_trainers_are_those_held_out(
    folder: Path, name: str, ranks: int, batch: int, skip: bool
) -> None:
    flags: dict[str, Any] = {"bad_rows": "skip"} if skip else {}
    held = opened(folder / name, batch, valid="40%", **flags).held_out
    assert held is not None
    check_dealt(held, ranks)


def check_dealt(stream: Source, ranks: int) -> None:
    expected = [samples_of(batch) for batch in stream]
    each = [[samples_of(batch) for batch in stream.dealt(rank, ranks)] for rank in range(ranks)]
    assert {len(batches) for batches in each} == {-(-len(expected) // ranks)}, "lookups need all of them"
    found = list(itertools.chain.from_iterable(zip(*each, strict=True)))
    assert found[: len(expected)] == expected and not any(found[len(expected) :])


@pytest.mark.parametrize("kind", ["text", "parquet", "synthetic", "shuffled", "open"])
def test_a_place_goes_on_for_any_trainers(folder: Path, kind: str) -> None:
    def anew() -> Source:
        if kind == "synthetic":
            return Synthetic("tiny", 8, batches=20)
        if kind == "open":
            return opened(folder / "text", 8, vocab="open", epochs=2)
        return opened(folder / ("text" if kind == "shuffled" else kind), 8, shuffle=50 * (kind == "shuffled"), epochs=2)

    whole = [samples_of(batch) for batch in anew() if len(batch.labels) == 8]
    for rank, ranks, to_rank, to_ranks in [(0, 1, 1, 2), (1, 4, 2, 3), (2, 3, 0, 1)]:
        first, last = block(rank, ranks, 4)
        mine = anew().sharded(first, last, 4)
        source = iter(mine)
        for _ in range(7 * (last - first)):
            next(source)
        place = mine.state_dict()
        if last - first > 1:
            next(source)
            assert mine.state_dict() is place or mine.state_dict() == place, "a batch counts with its last shard"
        first, last = block(to_rank, to_ranks, 4)
        other = anew().sharded(first, last, 4)
        other.load_state_dict(place)
        rest = [samples_of(batch) for batch in other]
        of = [sample for samples in whole[7:] for sample in samples[2 * first : 2 * last]]
        assert chained(rest) == of


def test_an_open_vocabulary_grows_by_the_batches_of_all(folder: Path) -> None:
    stream = opened(folder / "text", 64, vocab="open", valid="20%")
    check_shards(stream, 64, 4, 3)
    state = stream.sharded(0, 1, 4).state_dict()
    held = stream.held_out_at(state)
    assert held is not None
    check_dealt(held, 3)


def test_workers_read_the_same_shards(folder: Path) -> None:
    alone, by_two = (opened(folder / "text", 40, shuffle=100, workers=n).sharded(1, 3, 4) for n in (0, 2))
    assert list(map(samples_of, alone)) == list(map(samples_of, by_two))


class Backwards(Sampler[int]):
    """A user-defined sampler without a length."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return iter([(i + self.epoch) % self.samples for i in reversed(range(self.samples))])


@given(
    st.integers(0, 60), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4), st.data(), st.booleans(), st.integers(0, 3),
    st.integers(0, 2),
)  # fmt: skip
@cases(100)
def test_the_shards_of_a_sampler_are_the_batches_of_one(
    samples: int, shards: int, each: int, data: st.DataObject, shuffle: bool, epoch: int, begin: int
) -> None:
    batch, ranks = shards * each, data.draw(st.integers(1, shards))
    order = list(range(samples))
    if shuffle:
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(7 + epoch)).tolist()
    whole = [order[k : k + batch] for k in range(begin * batch, samples, batch)]
    whole = [one for one in whole if len(one) == batch or shards == 1]
    expected = [[one[v * each : (v + 1) * each] for v in range(shards)] for one in whole]
    found = []
    for rank in range(ranks):
        mine = skirl.ShardSampler(range(samples), batch, shards=shards, rank=rank, ranks=ranks, shuffle=shuffle, seed=7)
        mine.set_epoch(epoch, begin)
        own = (rank + 1) * shards // ranks - rank * shards // ranks
        assert len(mine) == own * len(whole)
        parts = list(mine)
        found.append([parts[k : k + own] for k in range(0, len(parts), own)])
    assert [list(itertools.chain.from_iterable(steps)) for steps in zip(*found, strict=True)] == expected


def test_a_sampler_gives_its_indices() -> None:
    theirs = Backwards(9)
    mine = skirl.ShardSampler(theirs, 4, shards=2, rank=1, ranks=2)
    assert list(mine) == [[6, 5], [2, 1]]
    mine.set_epoch(1)
    assert list(mine) == [[7, 6], [3, 2]]
    with pytest.raises(TypeError, match="the sampler in data has no length"):
        len(mine)


def test_it_asks_torch_which_trainer_it_is(tmp_path: Path) -> None:
    assert len(skirl.ShardSampler(range(8), 4)) == 2, "alone: two whole batches"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert list(skirl.ShardSampler(range(8), 4, shards=2)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    finally:
        dist.destroy_process_group()
