"""Every model through the recipe, as `skirl train --model NAME` makes it: bits, learning, golden losses, real data."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from skirl.cli.train import Verify
from skirl.models import DIN
from skirl.models.by_name import MODELS
from skirl.train.loop import steps
from skirl.train.recipe import Recipe

TINY = [f"{name}-tiny" for name in MODELS]


def losses(**flags: Any) -> list[float]:
    recipe = Recipe.of(**{"dim": 8, "cache": "3000", "lr": 0.05, "threads": 1, **flags})
    embeddings = recipe.embeddings(recipe.cache_size(0))
    model, dense = recipe.model_over(embeddings)
    with recipe.lookahead(model) as batches:
        return [done.loss for done in steps(model, dense, batches)]


def falls(found: list[float]) -> bool:
    """Return whether the mean of the last fifth is below that of the first tenth; False if one is not finite."""
    first, last = found[: len(found) // 10], found[-len(found) // 5 :]
    return sum(last) / len(last) < sum(first) / len(first)


@pytest.mark.parametrize("model", TINY)
def test_bits_are_those_of_the_plain_reference(model: Any) -> None:
    report = Verify.of(data="synthetic:tiny", model=model, dim=4, batch=8, steps=20, quiet=True).run()
    assert report["failed"] is None and report["runs"][0]["moved"]["fetched"] > 0


@pytest.mark.parametrize(
    "model", ["dlrm-tiny", *(pytest.param(n, marks=pytest.mark.slow) for n in TINY if n != "dlrm-tiny")]
)
def test_learns_what_is_planted(model: Any) -> None:
    """Predicting the click rate of 1/4 gives 0.562."""
    found = losses(data="synthetic:tiny", model=model, batch=256, steps=120)
    assert falls(found) and sum(found[-40:]) / 40 < 0.55


@pytest.mark.parametrize("model", ["deepfm-tiny", "dcnv2-tiny", "din-tiny"])
def test_golden_losses(golden, model: Any) -> None:
    golden(model, losses(data="synthetic:tiny", model=model, batch=64, steps=60, cache="2500", pooling_factor=3))


SCHEMA = """
label = [{ name = "click" }]
dense = [{ name = "age" }]
[[id]]
name = "item"
rows = 50
table = "item"
[[id]]
name = "history"
rows = 50
table = "item"
list = true
separator = " "
[[id]]
name = "tags"
rows = 20
list = true
separator = " "
pooling = "mean"
[[id]]
name = "user"
rows = 100
"""


@pytest.fixture
def log(tmp_path: Path) -> dict[str, str]:
    """Write a log in which a click is likely if the item was in the history."""
    draw = random.Random(0)
    lines = ["click,age,item,history,tags,user"]
    for _ in range(2400):
        item, history = draw.randrange(12), [draw.randrange(12) for _ in range(draw.randrange(6))]
        click = int(draw.random() < (0.95 if item in history else 0.05))
        tags = " ".join(str(draw.randrange(9)) for _ in range(draw.randrange(4)))
        lines.append(f"{click},{draw.random():.3f},{item},{' '.join(map(str, history))},{tags},{draw.randrange(80)}")
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    return {"data": f"csv:{tmp_path / 'log.csv'}", "schema": str(tmp_path / "schema.toml")}


def test_din_attends_to_the_list_of_the_targets_table(log: dict[str, str]) -> None:
    recipe = Recipe.of(**log, model="din-tiny", dim=8)
    model, _ = recipe.model_over(recipe.embeddings("100%"))
    assert isinstance(model, DIN) and model.history == {"history": "item"} and model.lists == {"history", "tags"}


@pytest.mark.parametrize("model", ["din-tiny", "dcat-tiny"])
def test_models_over_lists_have_the_bits_of_the_plain_reference(log: dict[str, str], model: Any) -> None:
    report = Verify.of(**log, model=model, dim=4, batch=8, steps=30, cache="45", quiet=True).run()
    assert report["failed"] is None and report["runs"][0]["moved"]["fetched"] > 0


@pytest.mark.parametrize(
    ("model", "least"), [("din-tiny", 0.37), pytest.param("dcat-tiny", 0.47, marks=pytest.mark.slow)]
)
def test_learns_from_a_history(log: dict[str, str], model: Any, least: float) -> None:
    """Predicting the click rate gives 0.519; the pooled vectors of Wide & Deep gave 0.426 after as many steps."""
    found = losses(**log, model=model, batch=50, epochs=4, dim=8, cache="100%", lr=0.2, dense_lr=0.005)
    assert sum(found[-24:]) / 24 < least


LOGS = ["criteo:criteo_parquet", "avazu:avazu/train.csv"]
FAST = [(LOGS[0], "dlrm-tiny"), (LOGS[0], "deepfm-tiny"), (LOGS[1], "din-tiny"), (LOGS[1], "wide-deep-tiny")]
OTHERS = [pytest.param(*pair, marks=pytest.mark.slow) for pair in product(LOGS, TINY) if pair not in FAST]


@pytest.mark.parametrize(("data", "model"), [*FAST, *OTHERS])
def test_trains_on_real_logs(data_folder: Path, data: str, model: Any) -> None:
    kind, _, path = data.partition(":")
    found = losses(data=f"{kind}:{data_folder / path}", model=model, batch=128, steps=60, rows="20000", cache="8000")
    assert falls(found), found
