"""An open vocabulary compared with a dict. Its state resumes at any batch, and evaluation sees it as it was."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skirl import cli
from skirl.checkpoint.codec import decode, encode
from skirl.data import DataFlags
from skirl.data.files.schema import BUILT_IN
from skirl.data.vocabulary.growing import Growing, Growth
from tests.cases import cases
from tests.data import logs


@pytest.fixture(scope="module")
def tsv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return logs.write_tsv(tmp_path_factory.mktemp("open") / "day_0", logs.criteo_rows(1500, seed=4))


def opened(tsv: Path, **flags: Any) -> Growing:
    stream = DataFlags(f"criteo:{tsv}", **{"batch": 8, "vocab": "open", "admit": 2, **flags}).stream()
    assert isinstance(stream, Growing)
    return stream


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=12), st.integers(1, 4), st.integers(3, 12),
    st.none() | st.integers(1, 4),
)  # fmt: skip
@cases(150)
def test_rows_are_those_of_a_dict(batches: list[list[int]], admit: int, limit: int, stale: int | None) -> None:
    growth, rows, counts, last, free = Growth(limit, admit), {}, Counter[int](), {}, 2
    for now, batch in enumerate(batches):
        expected = []
        for value in batch:
            if value == 0:
                expected.append(0)
                continue
            counts[value] += 1
            last[value] = now
            if value not in rows and counts[value] >= admit and free < limit:
                rows[value] = free
                free += 1
            expected.append(rows.get(value, 1))
        prints = np.array(batch, np.uint64)
        assert growth.grow(prints, now).tolist() == expected
        if stale is not None:
            growth.forget(now - stale)
            for value in [value for value, at in last.items() if at < now - stale]:
                del last[value], counts[value]
                rows.pop(value, None)
        assert growth.look_up(prints).tolist() == [rows.get(v, 1) if v else 0 for v in batch]
        other = Growth(limit, admit)
        other.load_state_dict(copy.deepcopy(growth.state_dict()), copy.deepcopy(growth.admitted))
        growth = other


@pytest.mark.parametrize("flags", [{}, {"stale": 20, "epochs": 2, "shuffle": 100}])
def test_a_state_goes_on_at_its_batch(tsv: Path, flags: dict[str, Any]) -> None:
    stream = opened(tsv, **flags)
    batches, states = [], [copy.deepcopy(stream.state_dict())]
    for batch in stream:
        batches.append(batch.sparse.values())
        states.append(copy.deepcopy(stream.state_dict()))
    assert any(int(values.max()) > 2 for values in batches)
    for taken in (0, 1, 63, 64, 65, 150, len(batches) - 1):
        other = opened(tsv, **flags)
        other.load_state_dict(decode(*encode(states[taken], "data")))
        rest = [batch.sparse.values() for batch in other]
        assert len(rest) == len(batches) - taken
        assert all(torch.equal(a, b) for a, b in zip(rest, batches[taken:])), taken
    again = [batch.sparse.values() for batch in stream]
    assert all(torch.equal(a, b) for a, b in zip(again, batches)), "the next pass begins with nothing"


def test_held_out_is_seen_as_it_was(tsv: Path) -> None:
    stream = opened(tsv, valid="20%", stale=50)
    states, seen = [], {}
    for number, _ in enumerate(stream):
        states.append(stream.state_dict())
        if number in (10, 90):
            assert stream.held_out is not None
            seen[number] = [batch.sparse.values() for batch in stream.held_out]
    for number, then in seen.items():
        late = stream.held_out_at(states[number])
        assert late is not None and late.samples == 300
        assert all(torch.equal(a.sparse.values(), b) for a, b in zip(late, then, strict=True))
    assert not torch.equal(seen[10][0], seen[90][0])


def test_training_is_the_same_whatever_is_read_ahead(tsv: Path, tmp_path: Path, as_json: Any) -> None:
    flags = "--model dlrm-tiny --dim 4 --batch 32 --rows 2000 --vocab open --admit 2 --stale 30 --valid 20% --threads 1"

    def run(*more: str) -> dict[str, Any]:
        return as_json("train", "--data", f"criteo:{tsv}", *flags.split(), "--eval-every", "20", "--quiet", *more)

    whole, short = run("--cache", "5000"), run("--cache", "100%", "--depth", "1")
    saved = ["--save", str(tmp_path / "saved"), "--cache", "5000"]
    run(*saved, "--steps", "21")
    resumed = run(*saved, "--resume")
    for other in (short, resumed):
        assert other["loss"] == whole["loss"] and other["test_auc"] == whole["test_auc"]


@pytest.mark.parametrize("stale", [None, 20])
def test_exported_rows_have_their_ids(
    tsv: Path, tmp_path: Path, stale: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ids of the last step, not those in the last copy of the vocabulary, compared with a plain count of the values."""
    schema = BUILT_IN["criteo"].toml()
    of_text = '[[id]]\nname = "C3"\ncolumn = ""\ntype = "{}"'
    (tmp_path / "s.toml").write_text(schema.replace(of_text.format("hex"), of_text.format("string")))
    flags = "--model dlrm-tiny --dim 4 --batch 16 --rows 5000 --cache 100% --admit 3 --threads 1 --quiet --steps 45"
    train = ["train", "--data", f"criteo:{tsv}", *flags.split(), "--vocab", "open", "--save", str(tmp_path / "c")]
    train += ["--schema", str(tmp_path / "s.toml")]
    assert cli.main([*train, "--stale", str(stale)] if stale else train) == 0
    assert cli.main(["export", str(tmp_path / "c"), "--out", str(tmp_path / "rows.parquet")]) == 0
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in pq.read_table(tmp_path / "rows.parquet").to_pylist():
        found.setdefault(row["table"], {})[row["row"]] = row
    assert len(found) == 26
    lines = logs.criteo_rows(1500, seed=4)[: 45 * 16]
    for name, rows in found.items():
        column = logs.CRITEO.index(name)
        expected, counts, last, place = {}, Counter[str](), {}, {}
        for at, line in enumerate(lines):
            step, value = at // 16 + 1, line[column]
            if stale and at % 16 == 0 and step % (stale // 4) == 0:
                for old in [old for old, seen in last.items() if seen < step - stale]:
                    del last[old], counts[old]
                    place.pop(old, None)
            if value:
                counts[value] += 1
                last[value] = step
                if counts[value] >= 3 and value not in place:
                    place[value] = len(expected) + 2
                    expected[place[value]] = value
        assert {number for number in rows if number > 1} <= set(expected) and len(expected) > 5
        for number, row in rows.items():
            value = expected.get(number)
            assert row["what"] == ("missing", "other", "id")[min(number, 2)]
            if value is None:
                assert row["id"] is None and row["fingerprint"] is None
            elif name == "C3":
                assert row["id"] is None and row["fingerprint"] == logs.text_hash(value.encode(), name)
            else:
                assert int(row["id"], 16) == int(value, 16)
                assert row["fingerprint"] == logs.number_hash(int(value, 16), name)
