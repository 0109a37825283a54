"""The position in a loader from which a run resumes, loaders that hang, and the copies of their batches."""

import logging
import os
import signal
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import skirl
from skirl import Batch, KeyedJagged
from skirl.pipeline.reader import Watch, own
from skirl.pipeline.stages import StageStuck
from skirl.tools.interrupts import Hold
from tests.loops import our_threads, wait_for


def batches() -> list[skirl.KeyedJagged]:
    return [skirl.KeyedJagged.one_hot(["a"], torch.tensor([[i]])) for i in range(12)]


class Plain:
    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[skirl.KeyedJagged]:
        for batch in batches():
            self.read += 1
            yield batch


class Stateful:
    """Knows its position, as StatefulDataLoader does."""

    def __init__(self) -> None:
        self.read = self.place = 0

    def __iter__(self) -> Iterator[skirl.KeyedJagged]:
        while self.place < 12:
            self.place += 1
            self.read += 1
            yield batches()[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def ids_after(loader: Any, state: dict[str, Any] | None = None, *, stop: int | None = None, **flags: Any) -> Any:
    """Return the ids that a loop sees, and the state at its end. It breaks after `stop` batches."""
    embeddings = skirl.EmbeddingBagCollection([skirl.Table("a", 100, 2)], optimizer=skirl.SGD(lr=0.1), cache=20)
    seen = []
    with skirl.lookahead(loader, embeddings, sparse=lambda ids: ids, **flags) as ahead:
        if state is not None:
            ahead.load_state_dict(state)
        for ids in ahead:
            embeddings(ids)["a"].sum().backward()
            seen.append(int(ids.values()[0]))
            if len(seen) == stop:
                return seen, ahead.state_dict()
    return seen, None


@pytest.mark.parametrize("flags", [{}, {"depth": 1, "prefetch": 0}, {"depth": 20}, {"depth": "epoch"}])
def test_a_loader_with_a_state_goes_on_exactly_and_reads_nothing_twice(flags, caplog):
    first, state = ids_after(Stateful(), stop=5, **flags)  # batches read ahead do not count
    loader = Stateful()
    with caplog.at_level(logging.INFO, "skirl"):
        rest, _ = ids_after(loader, state, **flags)
    assert first + rest == list(range(12))
    passes = 2 if flags.get("depth") == "epoch" else 1  # the loader is read once more, for its ids
    assert loader.read == passes * 7 and not caplog.records


@pytest.mark.parametrize("flags", [{}, {"depth": 1, "prefetch": 0}])
def test_any_other_loader_is_skipped_ahead_and_one_line_says_so(flags, caplog):
    first, state = ids_after(Plain(), stop=5, **flags)
    loader = Plain()
    with caplog.at_level(logging.INFO, "skirl"):
        rest, _ = ids_after(loader, state, **flags)
    assert first + rest == list(range(12)) and loader.read == 12
    assert [record.getMessage() for record in caplog.records] == [
        "resuming: skipping 5 batches of the loader, which has no state_dict"
    ]


def test_a_loader_that_became_shorter_is_refused():
    _, state = ids_after(Plain(), stop=5)
    with pytest.raises(
        ValueError, match="the loader ends at batch 3, but the run was saved after 5 batches of the pass"
    ):
        ids_after(batches()[:3], state)


def test_a_second_pass_with_more_batches_is_refused():
    passes = iter([batches()[:3], batches()[:4]])

    class Loader:
        def __iter__(self) -> Iterator[skirl.KeyedJagged]:
            return iter(next(passes))

    with pytest.raises(ValueError, match="a pass differs from the first at batch 3"):
        ids_after(Loader(), depth="epoch", prefetch=0)


def test_reads_within_timeout_are_left_alone(caplog):
    watch = Watch(0.3)
    for number in range(4):
        with Hold() as hold, watch.reading(hold, number):
            time.sleep(0.1)
    time.sleep(0.5)  # and nothing happens between reads
    watch.close()
    assert not caplog.records


def hangs_here(go):
    go.wait(30)


def test_a_hanging_loader_is_told_of_while_it_hangs(capfd, caplog):
    """Once after the timeout; nothing is raised inside the loader."""
    watch, go = Watch(0.2), threading.Event()
    sentence = r"the loader took \d\.\d s for batch 7, and timeout is 0.2 s: fix the loader, or raise"
    with pytest.raises(StageStuck, match=sentence), Hold() as hold, watch.reading(hold, 7):
        threading.Thread(target=lambda: (wait_for(lambda: caplog.records), go.set())).start()
        hangs_here(go)
        came_back = True
    watch.close()
    assert came_back
    stacks = capfd.readouterr().err
    assert stacks.count("in hangs_here") == 1 and "skirl-watch" not in caplog.text
    first = caplog.records[0].message
    assert "the loader has been at batch 7 for 0." in first and f"`kill {os.getpid()}`" in first


def test_a_step_of_the_loader_that_came_late_is_an_error(caplog):
    """Within a single read, as in the first pass of an epoch. The error names the late batch."""
    watch = Watch(0.2)
    with pytest.raises(StageStuck, match="for batch 1,"), Hold() as hold, watch.reading(hold, 0):
        watch.moved(1)
        time.sleep(0.3)
        watch.moved(2)
        pytest.fail("not reached")
    watch.close()


@pytest.mark.parametrize("wait", [0.0, 0.3])
def test_ctrl_c_ends_a_loader_at_once(wait):
    """Whether it has hung for longer than the timeout or not."""
    watch = Watch(0.1)
    with pytest.raises(KeyboardInterrupt), Hold() as hold, watch.reading(hold, 0):
        timer = threading.Timer(wait, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        timer.start()
        time.sleep(30)
    timer.join()
    watch.close()


def test_closed_its_thread_ends():
    watch = Watch(0.4)
    with Hold() as hold, watch.reading(hold, 0):
        assert our_threads() == ["skirl-watch"]
    watch.close()


Pair = namedtuple("Pair", "x y")


def test_a_slice_of_a_large_tensor_is_copied_alone():
    data = torch.arange(1_000_000)
    mine = own([data[5:9], data.view(1000, 1000)[:, 3]])
    assert [part.untyped_storage().nbytes() for part in mine] == [32, 8000]
    assert mine[0].tolist() == [5, 6, 7, 8]
    assert torch.equal(mine[1], data.view(1000, 1000)[:, 3])


def test_nothing_is_shared_with_the_loader():
    batch = Batch(
        torch.ones(2, 3), KeyedJagged(["a"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1])), torch.ones(2)
    )
    parts = Pair({"batch": batch}, np.ones(3))
    mine = own(parts)
    batch.dense.zero_()
    batch.sparse.values().zero_()
    parts.y[:] = 0
    assert type(mine) is Pair
    assert mine.x["batch"].dense.sum() == 6
    assert mine.x["batch"].sparse.values().tolist() == [1, 2]
    assert mine.y.sum() == 3


def test_one_tensor_in_two_places_stays_one():
    tensor = torch.ones(3)
    first, second = own([tensor, tensor])
    assert first is second


def test_gradients_wanted_stay_wanted():
    leaf = torch.ones(3, requires_grad=True)
    assert own(leaf).requires_grad and own(leaf).is_leaf
    assert own(leaf * 2).requires_grad  # plain deepcopy refuses


def test_torchrecs_own(recwarn):
    torchrec = pytest.importorskip("torchrec", reason="not installed: constraints/others.txt")
    values = torch.arange(1000)
    sparse = torchrec.KeyedJaggedTensor(keys=["a"], values=values[:3], lengths=torch.tensor([2, 1]))
    mine = own(sparse)
    values.zero_()
    assert mine.values().tolist() == [0, 1, 2]
    assert mine.values().untyped_storage().nbytes() == 24
    assert mine.offsets().tolist() == [0, 2, 3]
