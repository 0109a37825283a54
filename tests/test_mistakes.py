"""Mistakes that people make, and the sentence that each one gives: what was found, where, and what to do.

A line that begins with `skirl` is typed in a shell, in a folder with the files below; any other line is Python. `...`
stands for text that is long or differs between machines.
"""

import copy
import gzip
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import skirl
from skirl.cli import main
from skirl.data import DataFlags
from skirl.train.recipe import Recipe

SCHEMA = """
[file]
delimiter = ","
header = "yes"

[[label]]
name = "click"

[[dense]]
name = "price"

[[id]]
name = "app_id"
type = "int"
rows = 100
"""
ROW = "0,1.5,7\n"
HEAD = "click,price,app_id\n"
TEXTS = {
    "s.toml": SCHEMA,
    "good.csv": HEAD + ROW * 40,
    "renamed.csv": HEAD.replace("app_id", "appid") + ROW,
    "headless.csv": ROW * 3,
    "floats.csv": HEAD + ROW + "1,2,7.0\n",
    "fractions.csv": HEAD + ROW + "1,2,7.5\n",
    "label.csv": HEAD + ROW * 15 + "2,0,3\n",
    "label2.csv": HEAD + "2,0,3\n",
    "words.csv": HEAD + ROW + "1,cheap,3\n",
    "wide.csv": HEAD + ROW + "1,2,3,4\n",
    "empty.csv": "",
    "bare.toml": SCHEMA.replace('header = "yes"', ""),
    "no.toml": "click, price",
    "unknown.toml": SCHEMA + 'encodes = "row"\n',
    "label.toml": SCHEMA.replace('[[label]]\nname = "click"', ""),
    "two.toml": SCHEMA + '[[label]]\nname = "price"\n',
    "kind.toml": SCHEMA.replace('"int"', '"integer"'),
    "row.toml": SCHEMA.replace("rows = 100", 'rows = 5\nencode = "row"'),
    "flags.toml": "stpes = 3",
    "type.toml": 'batch = "64"',
    "shards.toml": "shards = 4",
    "notes.txt": "1",
    "runs/old/config.json": "{}",
}
CSV = "--data csv:good.csv --schema s.toml"
QUIET = "--run none --quiet"
TINY = f"--data synthetic:tiny --model dlrm-tiny --dim 4 --batch 32 --steps 8 {QUIET}"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mistakes")
    for name, text in TEXTS.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    (path / "bare").mkdir()
    packed = gzip.compress((HEAD + "".join(f"{i % 2},{i},{i % 97}\n" for i in range(5000))).encode())
    (path / "cut.csv.gz").write_bytes(packed[: len(packed) // 2])
    (path / "zipped.csv").write_bytes(b"PK\x03\x04" + bytes(30))
    (path / "binary.csv").write_bytes(b"\x00\x01" * 40)
    table = pa.table({"click": [0, 1], "price": [1.0, 2.0], "app_id": [[1], [2, 3]]})
    pq.write_table(table, path / "lists.parquet")
    pq.write_table(table.set_column(2, "appid", pa.array([1, 2])), path / "renamed.parquet")
    pq.write_table(table.set_column(2, "app_id", pa.array([1.5, 2.0])), path / "floats.parquet")
    whole = (path / "renamed.parquet").read_bytes()
    (path / "cut.parquet").write_bytes(whole[:-9])
    torch.save({"item.weight": torch.zeros(5, 3), "flat": torch.zeros(5)}, path / "weights.pt")
    rows = skirl.EmbeddingBagCollection([skirl.Table("item", 10, 4)], optimizer=skirl.SGD(lr=0.1), cache=5)
    skirl.save(path / "checkpoints", model=rows)
    for _ in range(2):
        skirl.save(path / "damaged", model=rows, keep_last=2)
    for file in (path / "damaged").rglob("*"):
        if file.is_file() and file.suffix != ".json":
            file.write_bytes(file.read_bytes()[:-1] + b"?")
    return path


def has() -> dict[str, Any]:
    """Return the names that a line of Python below may use; tables and batches are new for each line."""
    tables = [skirl.Table("item", rows=10, dim=4), skirl.Table("user", rows=20, dim=4)]

    def rows(*given: skirl.Table, **more: Any) -> skirl.EmbeddingBagCollection:
        return skirl.EmbeddingBagCollection(
            list(given) or tables, **{"optimizer": skirl.SGD(lr=0.1), "cache": 8, **more}
        )

    def batch(*ids: int, keys: tuple[str, ...] = ("item", "user"), **more: Any) -> skirl.KeyedJagged:
        values = torch.tensor(ids or (1, 2))
        return skirl.KeyedJagged(list(keys), values, lengths=torch.ones(len(values), dtype=torch.int64), **more)

    def ahead(loader: Any = None, model: Any = None, **more: Any) -> skirl.Lookahead:
        loader = [batch()] * 3 if loader is None else loader
        return skirl.lookahead(loader, model or rows(), **{"sparse": lambda ids: ids, **more})

    def train(loader: Any = None, model: Any = None, **more: Any) -> None:
        model = model or rows()
        with ahead(loader, model, **more) as batches:
            for ids in batches:
                torch.cat(list(model(ids).values())).sum().backward()

    class Drawn:
        """A loader with a different order in each pass."""

        passes = 0

        def __iter__(self) -> Iterator[Any]:
            self.passes += 1
            return iter([batch(self.passes, 2)])

    return {
        "torch": torch, "nn": torch.nn, "copy": copy, "skirl": skirl, "Recipe": Recipe, "DataFlags": DataFlags,
        "tables": tables, "rows": rows, "one": rows(), "batch": batch, "ahead": ahead, "train": train, "Drawn": Drawn,
    }  # fmt: skip


@dataclass(frozen=True)
class Mistake:
    name: str
    done: str
    said: str


def mistakes() -> list[Mistake]:
    """Return those of mistakes.txt: a name, what is typed, and the sentence, which may be wrapped."""
    blocks = Path(__file__).with_name("mistakes.txt").read_text().strip().split("\n\n")
    return [
        Mistake(name.removeprefix("# "), done.partition(" ")[2], " ".join(said))
        for name, done, *said in (block.splitlines() for block in blocks)
    ]


MISTAKES = mistakes()


DO = re.compile(
    r"\b(add|call|convert|did you mean|fix|get|give|install|iterate|leave|make|map|mend|name|pass|put|run|set|take|tell"
    r"|unpack|use|write|--help lists|must wrap)\b|for instance"
)
"""Every sentence must contain one of these words, because it has to say what to do."""


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_and_its_sentence(
    mistake: Mistake, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(folder)
    said = typed(mistake.done, capsys) if mistake.done.split()[0] == "skirl" else raised(mistake.done)
    pattern = ".*".join(map(re.escape, mistake.said.split("...")))
    assert re.fullmatch(pattern, said), said


def typed(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the first line that a command prints to stderr."""
    for name, flags in (("CSV", CSV), ("TINY", TINY), ("QUIET", QUIET)):
        line = line.replace(f"${name}", flags)
    code = main(shlex.split(line)[1:])
    caught = capsys.readouterr()
    first, *more = caught.err.splitlines()
    assert code in (1, 2) and not caught.out and (not more or "usage: skirl" in more[1])
    return first


def raised(code: str) -> str:
    """Return the message of the exception that a line of Python raises."""
    with pytest.raises(Exception) as error:
        exec(code, has())
    return str(error.value.args[0]) if isinstance(error.value, KeyError) else str(error.value)


def test_there_are_many_and_each_says_what_to_do():
    assert len({one.name for one in MISTAKES}) == len({one.done for one in MISTAKES}) == len(MISTAKES) >= 120
    for mistake in MISTAKES:
        assert DO.search(mistake.said.lower()), mistake.said
        assert not re.search(r"Traceback|Errno|object at 0x|<class", mistake.said), mistake.said
