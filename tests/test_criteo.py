"""What the documentation promises on real data: the quality of a model on the Criteo sample, with any cache."""

from pathlib import Path
from typing import Any

import pytest

RECIPE = "--valid 20% --model dlrm-tiny --dim 16 --batch 1024 --rows 10000"
"""The recipe in docs/howto/training.md."""


def test_a_dlrm_on_the_criteo_sample_with_and_without_a_cache(data_folder: Path, as_json: Any):
    paths = [data_folder / "criteo_first10k.tsv", data_folder / "criteo_parquet"]
    if not all(path.exists() for path in paths):
        pytest.skip(f"{data_folder} has no Criteo sample")

    def train(*flags: str) -> dict[str, Any]:
        data = "criteo:" + ",".join(map(str, paths))
        return as_json("train", "--data", data, *RECIPE.split(), "--threads", "1", "--quiet", *flags)

    resident, cached = train("--cache", "100%"), train("--cache", "20000")
    assert resident["test_auc"] >= 0.75 and resident["test_samples"] > 20_000
    assert cached["counters"]["fetched"] > 50_000 and resident["counters"]["fetched"] == 0
    same = [key for key in resident if key.startswith("test_")]
    for key in [*same, "loss", "auc", "logloss", "ne", "calibration", "steps"]:
        assert cached[key] == resident[key], key
