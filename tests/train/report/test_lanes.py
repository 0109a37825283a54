"""What each trainer did and who sent what to whom."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skirl.core.placement import Placement
from skirl.core.tables import Schema
from skirl.data.share import part_of
from skirl.peers.job import using
from skirl.train.commands import Train
from skirl.train.loop import keys_of
from skirl.train.recipe import Recipe
from tests.threads_as_trainers import InProcess

SMALL: dict[str, Any] = {
    "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 32, "steps": 6, "threads": 1, "shards": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two trainers."""
    folder = tmp_path_factory.mktemp("runs") / "two"

    def work(peers: InProcess) -> dict[str, Any]:
        with using(peers):
            return Train.of(**SMALL, cache="300", quiet=True, run=str(folder), log_every=2).run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skirl.pipeline.agree.check_weights", lambda *_: None)  # they share one generator
        first, second = InProcess.run(2, work)
    assert first["by_trainer"]["rows"] == second["by_trainer"]["rows"] and second["run"] is None
    return folder


def test_rows_are_counted_by_table_and_owner(run: Path) -> None:
    found = json.loads((run / "result.json").read_text())
    recipe = Recipe.of(**SMALL)
    schema, owners = Schema.of(recipe.tables()), Placement.even(2)
    expected: Counter[tuple[int, int, int]] = Counter()
    touched: list[set[int]] = [set(), set()]
    for batch in recipe.stream():
        half = len(batch.labels) // 2
        for reader in (0, 1):
            shard = part_of(batch, reader * half, (reader + 1) * half)
            keys = np.array(sorted(set(keys_of(shard.sparse, schema).tolist())))
            for key, owner in zip(keys.tolist(), owners.site_of(keys).tolist(), strict=True):
                expected[key >> 48, reader, owner] += 1
                touched[owner].add(key)
    for t, table in enumerate(schema.tables):
        assert found["by_trainer"]["rows"][table.name] == [[expected[t, r, o] for o in (0, 1)] for r in (0, 1)]
    lanes = found["by_trainer"]["lanes"]
    assert [lane["touched"] for lane in lanes] == list(map(len, touched))
    assert sum(lane["new"] for lane in lanes) == found["counters"]["new"] == sum(map(len, touched))
    vectors = sum(n for (_, reader, owner), n in expected.items() if reader != owner)
    sent = found["by_trainer"]["bytes"]
    assert sent[0][0] == sent[1][1] == 0 and min(sent[0][1], sent[1][0]) > 4 * 4 * vectors // 2
