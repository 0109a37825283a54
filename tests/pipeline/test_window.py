"""The window of a pass: when planning starts, and what the window holds."""

from dataclasses import replace

import torch

from skirl import Batch, KeyedJagged
from skirl.core.ids import capture
from skirl.engine.window import Window
from skirl.oracle.planner import Plan
from tests.loops import collection, stream


def micros(embeddings, batches, nbytes=0):
    features = embeddings.engine.schema.features
    return [replace(capture(b.sparse, features), batch=b, nbytes=nbytes) for b in batches]


def test_heavy_batches_end_the_first_window_and_every_other():
    embeddings = collection()
    window = Window([embeddings.engine], Plan(depth=1000, ramp=False, window_bytes=10_000))
    planned = 0
    for entered, micro in enumerate(micros(embeddings, stream(30)[0], nbytes=4000), start=1):
        window.enter([micro])
        while window.next() is not None:
            planned += 1
        assert entered - planned == min(entered, 2)  # the third batch fills the window, and one step is planned


def test_a_batch_weighs_what_the_user_and_the_planner_hold_of_it():
    embeddings = collection()
    ids = torch.zeros(1000, dtype=torch.int64)
    batch = Batch(None, KeyedJagged(["a1", "a2", "b", "c"], ids, lengths=torch.full((4,), 250)), None)  # type: ignore[arg-type]
    weights = []
    for bound in (18_900, 19_000, 19_100):
        window = Window([embeddings.engine], Plan(depth=1000, ramp=False, window_bytes=bound))
        window.enter(micros(embeddings, [batch], nbytes=3000))
        weights.append(window.next() is not None)
    assert weights == [True, True, False]  # 16 bytes per id besides the user's batch


def test_what_waits_in_the_window_is_ids_and_not_keys_and_bags(monkeypatch):
    embeddings = collection(cache=40)
    window = Window([embeddings.engine], Plan(depth=6, ramp=False))
    parts = micros(embeddings, stream(12)[0])
    seen, planned = [], 0
    resolver = type(embeddings.engine.resolver)
    real = resolver.check

    def noted(self, ids):
        seen.append(real(self, ids))
        return seen[-1]

    monkeypatch.setattr(resolver, "check", noted)
    for part in parts:
        window.enter([part])
        while window.next() is not None:
            planned += 1
        assert [hasattr(one.banks[0], "offsets") for one in seen] == [number < planned for number in range(len(seen))]
    assert planned == 7
