"""What people do with a trained model, their own files and skirl's: predict, look up, export, convert."""

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import skirl
from skirl import cli
from skirl.cli.files import Convert, Vocab
from skirl.cli.train import Evaluate, Predict, Train
from skirl.data.flags import DataFlags

SCHEMA = """
session = "visit"
time = "at"
[[label]]
name = "click"
[[dense]]
name = "age"
transform = "log"
indicator = true
[[id]]
name = "user"
rows = 300
[[id]]
name = "item"
rows = 200
[[id]]
name = "seen"
table = "item"
rows = 200
list = true
separator = "|"
"""
NAMES = ["click", "age", "user", "item", "seen", "visit", "at"]
ROWS = 200


def lines(n: int, seed: int = 0, ids: int = 60) -> list[list[str]]:
    draw = random.Random(seed)
    return [
        [
            str(draw.randrange(2)), draw.choice(["", "3", "40"]), f"u{draw.randrange(ids)}", f"i{draw.randrange(ids)}",
            "|".join(f"i{draw.randrange(ids)}" for _ in range(draw.randrange(4))), f"visit {i // 4}", str(1_700_000_000 + i),
        ]
        for i in range(n)
    ]  # fmt: skip


def write(path: Path, rows: list[list[str]], names: list[str] = NAMES) -> Path:
    path.write_text("".join(",".join(row) + "\n" for row in [names, *rows]))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("habits")
    (folder / "schema.toml").write_text(SCHEMA)
    write(folder / "log.csv", lines(ROWS))
    return folder


def flags_of(folder: Path, **more: Any) -> dict[str, Any]:
    flags = {"data": f"csv:{folder / 'log.csv'}", "schema": str(folder / "schema.toml"), "model": "dlrm-tiny", "dim": 4}
    return {**flags, "batch": 16, "valid": "20%", "cache": "75", "depth": 2, "quiet": True, **more}


def trained(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    return Train.of(**flags_of(folder, **more), save=folder / name).run()


@pytest.fixture(scope="module")
def run(folder: Path) -> dict[str, Any]:
    return trained(folder, "run", epochs=2, save_every=3)


def by_hand(folder: Path, run: dict[str, Any], name: str = "run", **data: Any) -> list[torch.Tensor]:
    """Return the logits of held-out batches, or of `data`, from a loop in which the model looks its rows up."""
    recipe = Train.of(**flags_of(folder, **{"epochs": 2, **run.get("flags", {})})).recipe
    embeddings = recipe.embeddings(50)
    model, _ = recipe.model_over(embeddings)
    skirl.load(folder / name, model=model)
    stream = DataFlags(**data).stream() if data else recipe.stream().held_out
    assert stream is not None
    model.eval()
    with torch.no_grad():
        return [model(batch) for batch in stream]


def predicted(folder: Path, name: str = "run", **chosen: Any) -> dict[str, np.ndarray]:
    into = folder / "predicted.parquet"
    Predict(checkpoint=folder / name, out=into, force=True, quiet=True, **chosen).run()
    table = pq.read_table(into)
    return {column: table[column].to_numpy() for column in table.column_names}


def converted(folder: Path, out: Path, **more: Any) -> None:
    flags = {"schema": str(folder / "schema.toml"), "force": True, "quiet": True}
    Convert(f"csv:{folder / 'log.csv'}", str(out), **flags, **more).run()


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_model_is_evaluated_later_and_the_metrics_are_those_at_the_end_of_its_training(folder, run):
    before = digests(folder / "run")
    found = Evaluate(checkpoint=folder / "run", held_out=True, quiet=True).run()
    for name in ("samples", "auc", "logloss", "ne", "calibration"):
        assert found[name] == run[f"test_{name}"]
    assert found["step"] == run["steps"] and run["counters"]["fetched"] > 0
    assert digests(folder / "run") == before


def test_predictions_are_the_bits_of_a_loop_of_ones_own_and_stand_beside_the_number_of_their_row(folder, run):
    logits = torch.cat(by_hand(folder, run)).numpy()
    found = predicted(folder, held_out=True)
    assert found["logit"].tobytes() == logits.tobytes()
    assert found["row"].tolist() == list(range(160, ROWS))
    assert found["label"].tolist() == [float(row[0]) for row in lines(ROWS)[160:]]
    expected = torch.sigmoid(torch.from_numpy(logits).double()).float().numpy()
    np.testing.assert_array_max_ulp(found["prediction"], expected, 1)


def test_a_file_of_tomorrow_has_no_labels_and_ids_that_no_batch_had(folder, run):
    rows = lines(70, seed=5, ids=1000)
    write(folder / "tomorrow.csv", [row[1:] for row in rows], NAMES[1:])
    write(folder / "labelled.csv", rows)
    labelled = {"data": f"csv:{folder / 'labelled.csv'}", "schema": str(folder / "schema.toml"), "batch": 16}
    expected = torch.cat(by_hand(folder, run, **labelled)).numpy()
    found = predicted(folder, data=f"csv:{folder / 'tomorrow.csv'}")
    assert found["logit"].tobytes() == expected.tobytes() and "label" not in found
    with pytest.raises(ValueError, match=r"data csv:.*tomorrow.csv has no labels to compare predictions with"):
        Evaluate(checkpoint=folder / "run", data=f"csv:{folder / 'tomorrow.csv'}", quiet=True).run()


@pytest.mark.parametrize("more", [{"store": "disk"}, {"vocab": "open", "admit": 2, "stale": 4}])
def test_rows_on_disk_and_an_open_vocabulary_predict_as_they_did_in_the_run(folder, more):
    name = "-".join(str(part) for part in more.values())
    if "store" in more:
        more = {"store": f"disk:{folder / 'rows'}"}
    run = trained(folder, name, **more)
    before = digests(folder / name)
    found = Evaluate(checkpoint=folder / name, held_out=True, quiet=True).run()
    assert [found[what] for what in ("auc", "logloss")] == [run[f"test_{what}"] for what in ("auc", "logloss")]
    assert digests(folder / name) == before


def test_rows_that_are_left_out_still_count(folder, run):
    rows = lines(90, seed=3)
    rows[7][0] = rows[40][0] = "x"
    write(folder / "torn.csv", rows)
    found = predicted(folder, data=f"csv:{folder / 'torn.csv'}", bad_rows="skip")
    assert found["row"].tolist() == [i for i in range(90) if i not in (7, 40)]
    late = predicted(folder, data=f"csv:{folder / 'torn.csv'}", bad_rows="skip", valid="time>=1700000060")
    assert late["row"].tolist() == list(range(60, 90))


def test_half_a_file_never_has_the_name_of_the_whole(folder, run):
    into = folder / "mine.parquet"
    into.write_bytes(b"of yesterday")
    broken = lines(90, seed=3)
    broken[80][1] = "x"
    write(folder / "broken.csv", broken)
    with pytest.raises(ValueError, match=r"broken.csv, line 82: column age is 'x'"):
        Predict(checkpoint=folder / "run", data=f"csv:{folder / 'broken.csv'}", out=into, force=True, quiet=True).run()
    assert into.read_bytes() == b"of yesterday" and not list(folder.glob("*.part"))
    converted(folder, folder / "log.parquet")
    with pytest.raises(ValueError, match=r"out is .*log.parquet, which is one of the data files: name another"):
        log = folder / "log.parquet"
        Predict(checkpoint=folder / "run", data=f"parquet:{log}", out=log, force=True, quiet=True).run()


def test_other_data_than_the_model_knows_is_refused_by_what_differs(folder, run, tmp_path):
    def refused(schema: str, data: Path = folder / "log.csv", **more: Any) -> str:
        (tmp_path / "other.toml").write_text(schema)
        with pytest.raises(ValueError) as caught:
            Evaluate(
                checkpoint=folder / "run", data=f"csv:{data}", schema=str(tmp_path / "other.toml"), quiet=True, **more
            ).run()
        return str(caught.value)

    fewer = SCHEMA[: SCHEMA.rindex("[[id]]")]
    assert "was saved with table 'item'.features = ['item', 'seen'], here it is ['item']:" in refused(fewer)
    assert "was saved with table 'user'.rows = 300, here it is 301:" in refused(SCHEMA.replace("300", "301"))
    assert "transform of 'age': log, and here: none:" in refused(SCHEMA.replace('"log"', '"none"'))
    write(tmp_path / "log.csv", lines(50))
    Vocab(
        f"csv:{tmp_path / 'log.csv'}", str(tmp_path / "v"), schema=str(folder / "schema.toml"), min_count=1, quiet=True
    ).run()
    assert "ids became rows: by hash, and here: by a vocabulary of" in refused(SCHEMA, vocab=str(tmp_path / "v"))
    with pytest.raises(ValueError, match=r"data is synthetic:tiny, but the run was trained on csv:"):
        Evaluate(checkpoint=folder / "run", data="synthetic:tiny", quiet=True).run()


def test_what_to_predict_has_to_be_said(folder, tmp_path):
    with pytest.raises(ValueError, match=r"the data is missing: name it after the checkpoint"):
        Evaluate(checkpoint=folder / "run")
    with pytest.raises(ValueError, match=r"out is x.csv: name a file that ends with .parquet"):
        Predict(checkpoint=folder / "run", held_out=True, out=Path("x.csv"))
    (tmp_path / "x.parquet").write_text("of yesterday")
    with pytest.raises(ValueError, match=r"x.parquet, which already exists: name another file, or add --force"):
        Predict(checkpoint=folder / "run", held_out=True, out=tmp_path / "x.parquet")
    rows = skirl.EmbeddingBagCollection([skirl.Table("a", 10, 2)], optimizer=skirl.SGD(lr=0.1), cache=4)
    skirl.save(tmp_path, model=rows)
    with pytest.raises(ValueError, match=r"was saved by another loop than skirl train's"):
        Evaluate(checkpoint=tmp_path, held_out=True).run()


def test_a_checkpoint_is_evaluated_in_a_loop_of_ones_own_without_copying_its_rows(folder, run):
    recipe = Train.of(**flags_of(folder, epochs=2)).recipe
    embeddings = recipe.embeddings(1, store="checkpoint")
    model, _ = recipe.model_over(embeddings)
    skirl.load(folder / "run", model=model)
    stream = recipe.stream()
    assert stream.held_out is not None
    model.eval()
    with torch.no_grad():
        found = [model(batch) for batch in stream.held_out]
    assert torch.equal(torch.cat(found), torch.cat(by_hand(folder, run)))
    with pytest.raises(ValueError, match=r"the rows of a checkpoint are not written to: to train them"):
        embeddings.engine.store.write(np.array([3]), np.zeros((1, 5), np.float32))


def test_the_suffix_says_what_an_export_is(tmp_path):
    rows = skirl.EmbeddingBagCollection([skirl.Table("item", 20, 3)], optimizer=skirl.SGD(lr=0.1), cache=20)
    ids = skirl.KeyedJagged.one_hot(["item"], torch.tensor([[7], [3]]))
    rows(ids)["item"].sum().backward()
    skirl.export(rows, tmp_path / "item.pt", "item")
    plain = torch.nn.EmbeddingBag(20, 3, mode="sum")
    plain.load_state_dict(torch.load(tmp_path / "item.pt"))
    rows.eval()
    assert torch.equal(plain(torch.tensor([[7], [3]])), rows(ids)["item"])
    skirl.export(rows, tmp_path / "item.parquet")
    table = pq.read_table(tmp_path / "item.parquet")
    assert (table["table"].to_pylist(), table["row"].to_pylist()) == (["item"] * 2, [3, 7])
    assert table["weight"].to_pylist() == plain.weight[[3, 7]].tolist()
    with pytest.raises(ValueError, match=r"path is .*item.npz: name a file that ends with .safetensors, .pt or"):
        skirl.export(rows, tmp_path / "item.npz")
    with pytest.raises(ValueError, match=r"Parquet holds the rows that were used: leave state_dict out"):
        skirl.export(rows, tmp_path / "item.parquet", state_dict=True)


def test_a_vocabulary_is_not_replaced_by_mistake(folder, tmp_path):
    flags = {"schema": str(folder / "schema.toml"), "min_count": 1, "quiet": True}
    Vocab(f"csv:{folder / 'log.csv'}", str(tmp_path / "v"), **flags).run()
    with pytest.raises(ValueError, match=r"out is .*v, which already exists, and runs may need it: .* add --force"):
        Vocab(f"csv:{folder / 'log.csv'}", str(tmp_path / "v"), **flags)
    assert Vocab(f"csv:{folder / 'log.csv'}", str(tmp_path / "v"), force=True, **flags).run()["samples"] == ROWS


def test_a_converted_file_keeps_who_and_when(folder, tmp_path):
    out = tmp_path / "log.parquet"
    converted(folder, out)
    table = pq.read_table(out)
    assert table["visit"].to_pylist() == [row[5] for row in lines(ROWS)]
    assert table["at"].to_pylist() == [float(row[6]) for row in lines(ROWS)]


def test_info_tells_the_damaged_in_a_sentence(folder, run, tmp_path, capsys):
    for path in (folder / "run").rglob("*"):
        if path.is_file():
            (tmp_path / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path.relative_to(folder)).write_bytes(path.read_bytes())
    for damaged in (tmp_path / "run" / "rows").iterdir():
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    assert cli.main(["info", str(tmp_path / "run")]) == 0
    assert cli.main(["info", str(tmp_path / "run"), "--check"]) == 1
    assert "is damaged: " in capsys.readouterr().err
