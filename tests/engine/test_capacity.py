"""The size of a cache: what a number of rows, a share, bytes and "auto" mean for one of several trainers."""

from typing import Any

import pytest

import skirl
from skirl.core.tables import Schema
from skirl.engine.capacity import Capacity
from skirl.peers.job import using
from tests.threads_as_trainers import InProcess

TABLES = [skirl.Table("a", 6000, 4), skirl.Table("b", 2000, 4)]
WIDTH = 20


@pytest.mark.parametrize(
    ("cache", "sites", "near", "rows"),
    [
        (100, 4, 4, 100),  # each holds as many as given
        ("10%", 1, 1, 800),
        ("10%", 4, 4, 200),  # of the 2,000 rows that each owns
        ("0.01%", 4, 4, 1),
        (f"{100 * WIDTH}B", 4, 4, 90),  # minus what is in flight
        ("auto", 1, 1, 990),  # half of the free memory
        ("auto", 2, 2, 490),  # half of that: two trainers share this memory
        ("auto", 4, 2, 490),
    ],
)
def test_of_one_trainer_among_several(cache: Any, sites: int, near: int, rows: int) -> None:
    capacity = Capacity.of(cache, Schema.of(TABLES), [WIDTH], lambda: 2000 * WIDTH, sites, near)
    split = capacity.decide([[1]], [1], in_flight=10, number=0)
    assert split.slots == [rows] and split.staging_rows == [10]
    assert capacity.saved_split({"cache": capacity.cache, "slots": [rows], "staging_rows": [10]}) == split


def test_trainers_of_one_machine_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skirl.engine.device.host.free_bytes", lambda: 2000 * WIDTH)

    def work(peers: InProcess) -> list[int]:
        with using(peers):
            rows = skirl.EmbeddingBagCollection(TABLES, optimizer=skirl.RowwiseAdagrad(lr=0.1), cache="auto")
        return rows.engine.capacity.decide([[1]], [1], in_flight=10, number=0).slots

    assert InProcess.run(1, work) == [[990]] and InProcess.run(2, work) == [[490]] * 2
