"""What each trainer did."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skirl.cli.train import Train
from skirl.core.placement import Placement
from skirl.core.tables import Schema
from skirl.peers.job import using
from skirl.train.loop import keys_of
from skirl.train.recipe import Recipe
from tests.threads_as_trainers import InProcess

SMALL: dict[str, Any] = {
    "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 32, "steps": 6, "threads": 1, "shards": 2,
}  # fmt: skip


def test_each_trainer_tells_of_the_rows_that_it_owns(tmp_path: Path) -> None:
    def work(peers: InProcess) -> dict[str, Any]:
        with using(peers):
            return Train.of(**SMALL, cache="300", quiet=True, run=str(tmp_path / "two"), log_every=2).run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skirl.pipeline.agree.check_weights", lambda *_: None)  # they share one generator
        first, second = InProcess.run(2, work)
    assert second["run"] is None
    found = json.loads((tmp_path / "two" / "result.json").read_text())
    lanes = found["by_trainer"]["lanes"]
    assert lanes == first["by_trainer"]["lanes"] == second["by_trainer"]["lanes"]
    recipe = Recipe.of(**SMALL)
    keys = np.unique(np.concatenate([keys_of(b.sparse, Schema.of(recipe.tables())) for b in recipe.stream()]))
    owners = Placement.even(2).site_of(keys)
    assert [lane["touched"] for lane in lanes] == np.bincount(owners, minlength=2).tolist()
    assert sum(lane["new"] for lane in lanes) == found["counters"]["new"] == len(keys)
    assert all(lane["sent"] > 0 for lane in lanes)
