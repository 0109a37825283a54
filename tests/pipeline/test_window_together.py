"""Windows of several trainers: each plans the requests for its rows, all plan the same batches, and all end together."""

import threading
from itertools import chain

import numpy as np
import pytest
import torch

from skirl import KeyedJagged
from skirl.core.ids import BadIds, Ids, capture
from skirl.core.placement import Placement
from skirl.engine.capacity import DoesNotFit
from skirl.engine.window import Window
from skirl.engine.work import Work
from skirl.oracle.options import Plan
from skirl.oracle.route import FailedElsewhere, SharedRoute
from tests.loops import FEATURES, collection
from tests.threads_as_trainers import InProcess

ByFeature = dict[str, list[int]]


def item(ids: ByFeature) -> Ids:
    values = [ids.get(name, []) for name in FEATURES]
    jagged = KeyedJagged(
        FEATURES,
        torch.tensor([*chain(*values)], dtype=torch.int64),
        lengths=torch.tensor([len(part) for part in values]),
    )
    return capture(jagged, FEATURES)


def run(
    batches: list[list[ByFeature]], plan: Plan, cache: int
) -> tuple[list[list[Work]], list[BaseException | None], list[Window], list[set[int]]]:
    """Run each rank's window. Return what it gives for its batches, how it ends, the window, and where caches are split."""
    ranks = len(batches)
    placement = Placement.even(ranks)
    engines = [collection(cache=cache).engine for _ in batches]
    meet = [peers.channel("ids").exchange for peers in InProcess.job(ranks, timeout=60)]
    together = [SharedRoute([(engine.schema, {})], r, placement, meet[r]) for r, engine in enumerate(engines)]
    windows = [Window([engine], plan, route=each) for engine, each in zip(engines, together, strict=True)]
    works: list[list[Work]] = [[] for _ in batches]
    errors: list[BaseException | None] = [None] * ranks
    splits: list[set[int]] = [set() for _ in batches]

    def drive(rank: int) -> None:
        window = windows[rank]
        try:
            for ids in [*batches[rank], None]:
                window.end() if ids is None else window.enter([item(ids)])
                while (step := window.next()) is not None or window.stopped:
                    if step is None:
                        splits[rank].add(window.next_number)
                        engines[rank].drop_caches()
                        window.begin_anew()
                        continue
                    works[rank] += step
                    window.executed(step[0].number)
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=drive, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return works, errors, windows, splits


def check(works: list[list[Work]], splits: list[set[int]]) -> None:
    """Check that every id leads to a slot with its row, at the owner that serves it."""
    count = len(works[0])
    assert [[work.number for work in of] for of in works] == [list(range(count))] * len(works)
    caches: list[list[dict[int, int]]] = [[{}, {}] for _ in works]
    for step in zip(*works, strict=True):
        served: list[list[np.ndarray]] = []
        for work, cache, split in zip(step, caches, splits, strict=True):
            keys_of = []
            for bank, planned in enumerate(work.steps):
                held = cache[bank]
                if work.number in split:
                    held.clear()
                for slot in planned.evict_slots.tolist():
                    del held[slot]
                came = (planned.fetch_keys, planned.forward_keys, planned.new_keys)
                where = (planned.fetch_slots, planned.forward_slots, planned.new_slots)
                for key, slot in zip(np.concatenate(came).tolist(), np.concatenate(where).tolist(), strict=True):
                    assert slot not in held
                    held[slot] = key
                assert len(planned.slots) == work.serve[bank][-1]
                keys_of.append(np.array([held[slot] for slot in planned.slots.tolist()], np.int64))
            served.append(keys_of)
        for rank, work in enumerate(step):
            for bank, reads in enumerate(work.reads):
                parts = [
                    keys_of[bank][slice(*other.serve[bank][rank : rank + 2])]
                    for keys_of, other in zip(served, step, strict=True)
                ]
                assert [len(part) for part in parts] == np.diff(reads.ask).tolist()
                read = np.concatenate(parts)[reads.place]
                assert read.tolist() == work.micros[0].banks[bank].keys().tolist()


def random_batches(rng: np.random.Generator, ranks: int, count: int) -> list[list[ByFeature]]:
    """Draw batches that first use mostly the wide tables' rows, and then mostly the narrow one's."""

    def ids(number: int) -> ByFeature:
        many, few = (6, 1) if number < count // 2 else (1, 6)
        return {
            "a1": rng.integers(0, 40, rng.integers(0, many + 1)).tolist(),
            "b": rng.integers(0, 30, many).tolist(),
            "c": rng.integers(0, 20, few).tolist(),
        }

    return [[ids(number) for number in range(count)] for _ in range(ranks)]


@pytest.mark.parametrize("depth", [1, 3, 20, "auto"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_all_plan_the_same_batches_also_where_caches_are_split_anew(ranks, depth):
    batches = random_batches(np.random.default_rng(ranks), ranks, 40)
    works, errors, _, splits = run(batches, Plan(depth), cache=16)
    assert errors == [None] * ranks
    check(works, splits)
    assert any(splits)
    assert len(works[0]) == 40


def test_they_end_with_the_first_that_has_no_more():
    batches = random_batches(np.random.default_rng(0), 2, 12)
    del batches[1][9:]
    works, errors, windows, splits = run(batches, Plan(4), cache=40)
    assert errors == [None, None]
    check(works, splits)
    assert len(works[0]) == 9 and windows[0].over and windows[1].over


def test_an_id_out_of_range_ends_all():
    batches = random_batches(np.random.default_rng(0), 3, 12)
    batches[1][7]["a1"] = [40]
    _, errors, *_ = run(batches, Plan("auto"), cache=40)
    says = r"^rank 1: batch 7, feature 'a1', sample 0: id 40 is outside table 'a'"
    for rank, kind in enumerate((FailedElsewhere, BadIds, FailedElsewhere)):
        with pytest.raises(kind, match=says):
            raise errors[rank] or AssertionError


@pytest.mark.parametrize("depth", [1, 20])
def test_a_batch_that_no_split_holds_ends_all(depth):
    batches = random_batches(np.random.default_rng(0), 2, 14)
    mine = [row for row in range(40) if Placement.even(2).site_of(np.array([row]))[0] == 1]
    batches[0][10]["a1"] = mine
    works, errors, _, splits = run(batches, Plan(depth), cache=len(mine) - 1)
    for rank, kind in enumerate((FailedElsewhere, DoesNotFit)):
        with pytest.raises(kind, match=r"^rank 1: cache \d+ is \d+ rows, batch 10 needs \d+"):
            raise errors[rank] or AssertionError
    assert len(works[0]) == len(works[1]) <= 10
