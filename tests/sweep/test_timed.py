"""What a plan says of a model and its steps, without allocating them."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skirl.models.by_name import MODELS
from skirl.sweep import timed
from skirl.sweep.command import SweepCommand
from skirl.sweep.timed import Pack, largest_batch, seconds_a_step
from skirl.train.recipe import Recipe
from tests.killed import ended, forked

DATA = {"dlrm": "tiny", "din": "sessions", "dcat": "sessions"}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("model", [f"{name}{size}" for name in MODELS for size in ("", "-tiny")])
def test_a_model_is_described_as_it_is(model: str, optimizer: str):
    data = DATA.get(model.removesuffix("-tiny"), "tiny")
    recipe = Recipe.of(data=f"synthetic:{data}", model=model, dim=8, optimizer=optimizer, batch=16, steps=1)
    embeddings = recipe.embeddings(1, store="memory")
    made, _ = recipe.model_over(embeddings)
    weights = [weight for weight in made.parameters() if weight.numel()]
    pack = Pack.of(recipe)
    assert (pack.weights, pack.weight_bytes) == (sum(w.numel() for w in weights), sum(w.nbytes for w in weights))
    tables = embeddings.engine.schema.tables
    numbers = sum(table.rows * recipe.row_optimizer().width(table.dim) for table in tables)
    assert pack.record_bytes == 4 * numbers / sum(table.rows for table in tables)
    embeddings.close()
    described, _ = recipe.described()
    assert all(weight.is_meta for weight in described.parameters() if weight.numel())


def test_steps_that_would_take_much_memory_are_predicted_from_smaller_ones(monkeypatch: pytest.MonkeyPatch):
    recipe = Recipe.of(data="synthetic:tiny", model="dlrm-tiny", dim=8, batch=512, threads=1)
    pack, taken = Pack.of(recipe), []
    monkeypatch.setattr(timed, "_timed", lambda recipe, batch: taken.append(batch) or 1.0 + batch)
    assert seconds_a_step(recipe, pack, 6.0) == (513.0, "timed steps")
    of_rows = sum(table.rows for table in recipe.tables()) * timed._BITS // 8
    for room, by in ((0.5, "timed steps of smaller batches"), (0.05, "products of matrices")):
        monkeypatch.setattr(timed, "ROOM", 96 << 20)
        sample = (96 << 20) / (largest_batch(recipe, pack, 6.0) or 1)
        monkeypatch.setattr(timed, "ROOM", of_rows + 4 * pack.weight_bytes + int(room * 512 * sample))
        seconds, how = seconds_a_step(recipe, pack, 6.0)
        assert how == by and (seconds == 513.0 or by == "products of matrices")
    assert taken[0] == 512 and taken[1] == taken[2] // 4 and 200 < taken[2] <= 256


@pytest.mark.parametrize("steps", [1, 2, 3, 6, 20])
def test_a_step_is_timed_over_as_many_as_there_are_and_the_first_only_if_it_is_alone(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "s.toml").write_text(
        '[[label]]\nname = "y"\n[[id]]\nname = "a"\ntype = "int"\n[file]\ncolumns = ["y", "a"]'
    )
    (tmp_path / "d.csv").write_text("".join(f"{n % 2},{n}\n" for n in range(8 * steps)))
    flags = {"data": f"csv:{tmp_path / 'd.csv'}", "schema": str(tmp_path / "s.toml"), "rows": "200", "batch": 8}
    flags |= {"model": "dlrm-tiny", "dim": 4, "threads": 1, "cache": "100%"}
    clock, trained = [0.0], timed.steps

    def slow(*args: Any) -> Iterator[Any]:
        for n, step in enumerate(trained(*args)):
            clock[0] += 3.0 if n else 100.0
            yield step

    with monkeypatch.context() as patch:
        patch.setattr(timed, "steps", slow)
        patch.setattr(timed.time, "perf_counter", lambda: clock[0])
        assert timed._timed(Recipe.of(**flags), 8) == (3.0 if steps > 1 else 100.0)
    plan = SweepCommand.of(**flags, steps=100, vary=("lr=0.1,0.2",), plan=True).run()
    assert plan["steps"] == (steps if steps < timed.TRIED else 100)
    assert SweepCommand.of(**flags, vary=("lr=0.1,0.2",), plan=True).run()["steps"] == (
        steps if steps < timed.TRIED else None
    )


def test_a_short_sweep_is_not_said_to_take_no_time():
    flags = {"model": "dlrm-tiny", "dim": 4, "batch": 16, "vary": ("lr=0.1,0.2",), "cache": "100", "quiet": True}
    made = SweepCommand.of(**flags, data="synthetic:tiny", steps=2, run="none", plan=True)
    assert made.summary(made.run())["time"].startswith("At most a second, ")


def test_a_plan_of_17_gigabytes_takes_hardly_any_memory(tmp_path: Path):
    """In a process of its own, of which the system knows the peak."""

    def command(**more: object) -> SweepCommand:
        flags = {"model": "dlrm", "dim": 64, "batch": 256, "vary": ("top=32768x32768,64x64", "optimizer=sgd,adam")}
        flags |= {"steps": 100, "cache": "4GiB", "quiet": True, "run": "none", "plan": True}
        return SweepCommand.of(**flags | more)

    def child(begins: Callable[[], object]) -> None:
        begins()
        command(data="synthetic:tiny", vary=("lr=0.1,0.2",), model="dlrm-tiny", cache="100").run()  # imports, compiles
        before = resident()
        plan = command(data="synthetic:criteo-terabyte").run()
        grown = resident() - before
        (tmp_path / "told").write_text(f"{plan['dense_bytes']} {plan['cache_bytes']} {grown}")

    assert ended(*forked(child)) == 0
    dense, cache, grown = map(float, (tmp_path / "told").read_text().split())
    assert dense > 17e9 and cache > 4e9 and grown < 60e6


def resident() -> int:
    """Return the peak of this process's memory, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{os.getpid()}/status").read_text())
    assert found is not None
    return int(found[1]) << 10
