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

# Files.

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
    "notes.txt": "1",
    "runs/old/config.json": "{}",
}
CSV = "--data csv:good.csv --schema s.toml"
QUIET = "--run none --quiet"
TINY = f"--data synthetic:tiny --model dlrm-tiny --dim 4 --batch 32 --steps 8 {QUIET}"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the files that the mistakes are made with."""
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
    skirl.save(path / "damaged", model=rows)
    for file in (path / "damaged").rglob("*"):
        if file.is_file() and file.suffix != ".json":
            file.write_bytes(file.read_bytes()[:-1] + b"?")
    return path


# Names that Python users have at hand.


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
    """A mistake and its sentence."""

    name: str
    done: str
    """The line that is typed."""
    said: str
    """The sentence that it gives."""


M = Mistake
MISTAKES = [
    M(
        "no command",
        "skirl",
        "skirl: no command is named: name one of those below",
    ),
    M(
        "a command misspelt",
        "skirl trian",
        "skirl: 'trian' is not a command; did you mean 'train'?",
    ),
    M(
        "a flag misspelt",
        "skirl train --cach 10%",
        "skirl train: there is no flag --cach: did you mean --cache?",
    ),
    M(
        "a word without a flag",
        "skirl train 10%",
        "skirl train: '10%' is not the value of a flag: write a flag before it (skirl train --help lists them)",
    ),
    M(
        "a word for a number",
        "skirl train --steps many",
        "skirl train: --steps is 'many': set it to a whole number",
    ),
    M(
        "a number for a switch",
        "skirl train --json=1",
        "skirl train: --json takes no value: write --json alone, or leave it out",
    ),
    M(
        "no value",
        "skirl train --steps",
        "skirl train: --steps has no value: set it to a whole number",
    ),
    M(
        "steps of 0",
        "skirl train --steps 0",
        "skirl train: --steps is 0: set it to 1 or more",
    ),
    M(
        "a model misspelt",
        "skirl train --model dlrn",
        'skirl train: --model is \'dlrn\' (did you mean dlrm?): set it to "dlrm", "dlrm-tiny", "wide-deep", '
        '"wide-deep-tiny", "deep-cross", "deep-cross-tiny", "deepfm", "deepfm-tiny", "dcnv2", "dcnv2-tiny", '
        '"din", "din-tiny", "dcat" or "dcat-tiny"',
    ),
    M(
        "a depth that is none",
        "skirl train --depth all",
        'skirl train: --depth is \'all\': set it to a whole number, "auto" or "epoch"',
    ),
    M(
        "data without its kind",
        "skirl train --data day_0.tsv",
        "skirl train: --data is 'day_0.tsv': set it to synthetic:NAME, criteo:PATH, avazu:PATH, mind:PATH, csv:PATH or "
        "parquet:PATH",
    ),
    M(
        "a synthetic set that is none",
        "skirl train --data synthetic:criteo",
        "skirl train: there is no synthetic data set 'criteo' (did you mean criteo-kaggle?): name one of "
        "tiny, avazu, criteo-kaggle, criteo-terabyte, sessions",
    ),
    M(
        "a share of more than all",
        "skirl train --cache 120%",
        "skirl train: --cache is '120%': set it to a share above 0% and up to 100%",
    ),
    M(
        "a cache that is not a size",
        "skirl train --cache some",
        "skirl train: --cache is 'some': set it to a number of rows, a share like '10%', a size like '4GiB' or 'auto'",
    ),
    M(
        "a share of touched rows without %",
        "skirl train --cache touched:5",
        "skirl train: --cache is 'touched:5': set it to touched: and a share above 0% and up to 100%, like touched:10%",
    ),
    M(
        "a store that is none",
        "skirl train --store s3:rows",
        "skirl train: --store is 's3:rows': set it to memory, disk:FOLDER, rpc://HOST:PORT or placed:PLAN.json",
    ),
    M(
        "checkpoints without a folder",
        "skirl train --save-every 5",
        "skirl train: --save-every, --save-minutes, --keep, --keep-best and --resume need a folder: set --save",
    ),
    M(
        "evaluations without samples",
        "skirl train --eval-every 5",
        "skirl train: --eval-every needs samples that are held out: set --valid, to 20% say",
    ),
    M(
        "patience without evaluations",
        "skirl train --valid 20% --patience 3",
        "skirl train: --patience counts evaluations: set --eval-every to the steps between two",
    ),
    M(
        "a GPU that is not there",
        "skirl train --device cuda",
        "skirl train: --device is 'cuda', and torch ... sees no GPU: install torch's CUDA build and a driver,"
        " or set --device to 'cpu'",
    ),
    M(
        "half precision on a CPU",
        "skirl train --dtype bfloat16",
        "skirl train: --dtype is 'bfloat16' and --device 'cpu': rows of 16 bits are trained on a GPU, set "
        "--device to cuda",
    ),
    M(
        "a flag of another model",
        "skirl train --model dlrm-tiny --rank 4",
        "skirl train: --rank is a flag of deep-cross and dcnv2, and dlrm does not have it: leave it out, or set "
        "--model to one of these",
    ),
    M(
        "a target that is no feature",
        "skirl train --model din --target nobody",
        "skirl train: DIN has no feature 'nobody': set --target to one of C1, C2, C3, C4, C5, C6, C7, C8, C9,"
        " C10, C11, C12, C13, C14, C15, C16, C17, C18, C19, C20, C21, C22, C23, C24, C25, C26",
    ),
    M(
        "epochs of what has no end",
        "skirl train --epochs 3",
        "skirl train: --epochs is a flag of files, and --data is synthetic: leave it out",
    ),
    M(
        "a flag of synthetic data for files",
        "skirl train $CSV --rows-scale 2",
        "skirl train: --rows-scale is a flag of synthetic data, and --data is files: leave it out",
    ),
    M(
        "an open vocabulary's flag without one",
        "skirl train $CSV --admit 3",
        "skirl train: --admit is a flag of an open vocabulary: set --vocab to open, or leave it out",
    ),
    M(
        "hashed and by vocabulary",
        "skirl train $CSV --rows 10 --vocab ids.vocab",
        "skirl train: --rows and --vocab are both set: a vocabulary says how many rows there are, leave --rows out",
    ),
    M(
        "a vocabulary that is not there",
        "skirl train $CSV --vocab ids.vocab",
        "skirl train: vocabulary ids.vocab: there is no such file: set --vocab to one that `skirl vocab` made",
    ),
    M(
        "a vocabulary that is none",
        "skirl train $CSV --vocab notes.txt",
        "skirl train: vocabulary notes.txt is not a vocabulary, or is damaged (...): set --vocab to one that "
        "`skirl vocab` made",
    ),
    M(
        "rows of a table that is none",
        "skirl train $CSV --rows 100,app=5",
        "skirl train: --rows is '100,app=5': there is no table 'app', name one of app_id",
    ),
    M(
        "all held out",
        "skirl train $CSV --valid 200%",
        "skirl train: --valid is '200%': set it to a share above 0% and below 100%",
    ),
    M(
        "held out by a time that files have not",
        "skirl train $CSV --valid time>=3",
        "skirl train: --valid is 'time>=3': the schema names no time column: write time = \"COLUMN\" at "
        "its top, or set --valid to a share such as 20%",
    ),
    M(
        "held out by time of synthetic data",
        "skirl train --valid time>=3",
        "skirl train: --valid is 'time>=3': a synthetic stream has no time, set it to a share such as 20%",
    ),
    M(
        "a schedule of unknown length",
        "skirl train $CSV --bad-rows skip --schedule linear",
        "skirl train: --schedule is linear, which has to know the number of steps in advance: set --steps",
    ),
    M(
        "a link without delay",
        "skirl size synthetic:tiny --link fast",
        "skirl size: --link is 'fast': write it RATE,DELAY, such as 1Gbit,100us",
    ),
    M(
        "a configuration that is not there",
        "skirl train --config mine.toml",
        "skirl train: --config is 'mine.toml', which cannot be read: set it to a TOML file or a config.json",
    ),
    M(
        "a configuration with a flag misspelt",
        "skirl train --config flags.toml",
        "skirl train: flags.toml: stpes is not a flag of this command: did you mean steps?",
    ),
    M(
        "a configuration with a text for a number",
        "skirl train --config type.toml",
        'skirl train: type.toml: batch is "64": set it to a whole number',
    ),
    M(
        "a run folder that is taken",
        "skirl train $TINY --run runs/old",
        "skirl train: --run is runs/old, which already holds a run: set --run to another folder, or go on with "
        "that one: add --resume and its --save",
    ),
    M(
        "a tracker that is not installed",
        "skirl train $TINY --wandb clicks --run runs/new",
        "skirl train: --wandb is set, but its package is not installed: pip install wandb, or leave --wandb out",
    ),
    M(
        "a cache too small for a batch",
        "skirl train $TINY --cache 10 --depth epoch",
        "skirl train: --cache 10 is 10 rows, batch 0 needs 130, and batch 2 needs 132, the most of the whole "
        "run: set --cache to 132 or more, or use smaller batches",
    ),
    M(
        "a cache in bytes too small for a batch",
        "skirl train $TINY --cache 2KiB --depth epoch",
        "skirl train: --cache '2KiB' has 1,028 bytes for rows and 1,020 for staging (rows on their way, at"
        " most half), batch 0 needs 2,600, and batch 2 needs 2,640, the most of the whole run: set --cache to"
        " 5320 bytes or more ('5320B'), or use smaller batches",
    ),
    M(
        "checkpoints of another kind in the folder",
        "skirl train $TINY --save checkpoints",
        "skirl train: checkpoints holds the checkpoints of a run: add --resume to go on from them, or set "
        "--save to another folder",
    ),
    M(
        "a table per label",
        "skirl train --data csv:good.csv --schema two.toml",
        "skirl train: --data is csv:good.csv, with 2 labels (click, price), and dlrm predicts one: leave one "
        "[[label]] in two.toml",
    ),
    M(
        "no file there",
        "skirl train --data csv:bad.csv --schema s.toml",
        "skirl train: bad.csv: there is no such file or folder in ...: set --data to one that exists",
    ),
    M(
        "no file by that pattern",
        "skirl train --data csv:day_* --schema s.toml",
        "skirl train: day_*: no file matches this pattern: set --data to one that does",
    ),
    M(
        "a folder without files",
        "skirl train --data csv:bare --schema s.toml",
        "skirl train: bare: the folder holds no data files: set --data to another, or to a pattern like "
        "bare/*/*.parquet",
    ),
    M(
        "an empty file",
        "skirl train --data csv:empty.csv --schema s.toml",
        "skirl train: empty.csv is empty: remove it, or get it again",
    ),
    M(
        "a file packed by zip",
        "skirl train --data csv:zipped.csv --schema s.toml",
        "skirl train: zipped.csv is a zip archive: unpack it, or pack it with gzip",
    ),
    M(
        "a file that is not text",
        "skirl train --data csv:binary.csv --schema s.toml",
        "skirl train: binary.csv is not text: there is a zero byte at 0: set --data to text, Parquet or Arrow files",
    ),
    M(
        "no schema",
        "skirl train --data csv:good.csv",
        "skirl train: good.csv: nothing says what its columns mean: set --schema to a TOML file that does, "
        "docs/data.md has an example",
    ),
    M(
        "a schema that is not there",
        "skirl train --data csv:good.csv --schema t.toml",
        "skirl train: schema t.toml cannot be read (No such file or directory): set --schema to a TOML file",
    ),
    M(
        "a schema that is not TOML",
        "skirl train --data csv:good.csv --schema no.toml",
        "skirl train: schema no.toml is not valid TOML (...)): fix it; docs/data.md has an example",
    ),
    M(
        "a schema with an unknown field",
        "skirl train --data csv:good.csv --schema unknown.toml",
        "skirl train: schema unknown.toml: [[id]] 'app_id': there is no 'encodes', did you mean 'encode'?",
    ),
    M(
        "a schema without a label",
        "skirl train --data csv:good.csv --schema label.toml",
        "skirl train: schema label.toml: the schema names no label: add [[label]] with the name of its column",
    ),
    M(
        "a type that is none",
        "skirl train --data csv:good.csv --schema kind.toml",
        "skirl train: schema kind.toml: [[id]] 'app_id': type is 'integer', set it to string or hex or int or"
        " float or fingerprint",
    ),
    M(
        "a column of another name",
        "skirl train --data csv:renamed.csv --schema s.toml $QUIET",
        "skirl train: renamed.csv: its header has no column 'app_id', did you mean 'appid'? (there are click,"
        " price, appid): name the column in the schema as the file does, or fix the header",
    ),
    M(
        "a column of another name in Parquet",
        "skirl train --data parquet:renamed.parquet --schema s.toml $QUIET",
        "skirl train: renamed.parquet: it has no column 'app_id', did you mean 'appid'? (there are click, "
        "price, appid): name the column in the schema as the file does, or write the file again",
    ),
    M(
        "neither header nor columns",
        "skirl train --data csv:headless.csv --schema bare.toml $QUIET",
        "skirl train: headless.csv: its first line ('0,1.5,7') is not a header that names column 'click', and the "
        "schema does not list the columns: write columns = [...] under [file] in it",
    ),
    M(
        "floats for ids",
        "skirl train --data csv:floats.csv --schema s.toml $QUIET",
        "skirl train: floats.csv, line 3: column app_id is '7.0', expected a whole number of at most 64 bits,"
        ' or nothing (write type = "float" at app_id in the schema: it takes 7.0 for 7): fix it, or skip '
        "such rows with --bad-rows skip",
    ),
    M(
        "fractions for ids",
        "skirl train --data csv:fractions.csv --schema s.toml $QUIET",
        "skirl train: fractions.csv, line 3: column app_id is '7.5', expected a whole number of at most 64 "
        "bits, or nothing (numbers with a fraction are not ids: is app_id a [[dense]] column?): fix it, or "
        "skip such rows with --bad-rows skip",
    ),
    M(
        "fractions for ids in Parquet",
        "skirl train --data parquet:floats.parquet --schema s.toml $QUIET",
        "skirl train: floats.parquet, row 1 of row group 1: column app_id is 1.5, expected a whole number of "
        "at most 64 bits, or nothing (numbers with a fraction are not ids: is app_id a [[dense]] column?): "
        "fix it, or skip such rows with --bad-rows skip",
    ),
    M(
        "a label of 2",
        "skirl train --data csv:label.csv --schema s.toml $QUIET",
        "skirl train: label.csv, line 17: label click is '2', expected 0 or 1: fix it, or skip such rows "
        "with --bad-rows skip",
    ),
    M(
        "a word for a price",
        "skirl train --data csv:words.csv --schema s.toml $QUIET",
        "skirl train: words.csv, line 3: column price is 'cheap', expected a finite number, or nothing: fix "
        "it, or skip such rows with --bad-rows skip",
    ),
    M(
        "a line too long",
        "skirl train --data csv:wide.csv --schema s.toml $QUIET",
        "skirl train: wide.csv, line 3: the line has 4 columns ('1,2,3,4'), expected 3: fix it, or skip "
        "such rows with --bad-rows skip",
    ),
    M(
        "an id outside its table",
        "skirl train --data csv:good.csv --schema row.toml $QUIET",
        "skirl train: good.csv, line 2: column app_id is '7', expected a row from 0 to 4, as the schema sets "
        "rows: fix it, or skip such rows with --bad-rows skip",
    ),
    M(
        "lists that the schema does not know",
        "skirl train --data parquet:lists.parquet --schema s.toml $QUIET",
        "skirl train: lists.parquet: column 'app_id' holds lists: write list = true under its [[id]] in the "
        "schema; other columns have one value a row",
    ),
    M(
        "a truncated Parquet file",
        "skirl train --data parquet:cut.parquet --schema s.toml $QUIET",
        "skirl train: cut.parquet is truncated: its ... bytes do not end as such a file does: get it again, or"
        " write it again",
    ),
    M(
        "a truncated gzip file",
        "skirl train --data csv:cut.csv.gz --schema s.toml $QUIET",
        "skirl train: cut.csv.gz is damaged: what follows byte 0 of its text cannot be unpacked (...): get it again",
    ),
    M(
        "a vocabulary without a place",
        "skirl vocab --data csv:good.csv",
        "skirl vocab: --out is missing: add --out TEXT (the vocabulary file to write)",
    ),
    M(
        "a vocabulary of synthetic data",
        "skirl vocab --data synthetic:tiny --out ids.vocab",
        "skirl vocab: --data is 'synthetic:tiny': set it to files, one of criteo:PATH, avazu:PATH, mind:PATH, csv:PATH, "
        "parquet:PATH",
    ),
    M(
        "a folder that is not there",
        "skirl vocab $CSV --out no/ids.vocab",
        "skirl vocab: --out is 'no/ids.vocab': its folder does not exist: make it first, or set --out to another",
    ),
    M(
        "a count of 0",
        "skirl vocab $CSV --out ids.vocab --min-count 0",
        "skirl vocab: --min-count is 0: set it to 1 or more",
    ),
    M(
        "memory that is not a size",
        "skirl vocab $CSV --out ids.vocab --memory lots",
        "skirl vocab: --memory is 'lots': set it to a size such as 4GiB",
    ),
    M(
        "nothing to size",
        "skirl size",
        "skirl size: say which data, for instance `skirl size synthetic:avazu --model dlrm-tiny --dim 16 "
        "--batch 1024 --steps 50`; skirl size --help lists what else can be set",
    ),
    M(
        "data named twice",
        "skirl size synthetic:tiny --data synthetic:tiny",
        "skirl size: data is given twice, with its name and without it: leave one of them out",
    ),
    M(
        "a step of no time",
        "skirl size synthetic:tiny --step-ms 0",
        "skirl size: --step-ms is 0.0: set it to milliseconds above 0",
    ),
    M(
        "a report of nothing",
        "skirl report",
        "skirl report: no folder is named: write skirl report FOLDER (the folder of the run)",
    ),
    M(
        "a report of no run",
        "skirl report bare",
        "skirl report: bare has no config.json: name the folder of a run, such as runs/dlrm-synthetic-...",
    ),
    M(
        "a report of a run that left nothing",
        "skirl report runs/old",
        "skirl report: runs/old/config.json is damaged, or was written by another version of skirl (flags is missing): "
        "name another run",
    ),
    M(
        "an export without a file",
        "skirl export checkpoints",
        "skirl export: no out is named: write skirl export CHECKPOINT OUT (the file to write: "
        ".safetensors, .pt for a state dict, or .parquet)",
    ),
    M(
        "an export of no checkpoint",
        "skirl export bare rows.pt",
        "skirl export: bare holds no checkpoint: give a folder that skirl.save or `skirl train --save` has written",
    ),
    M(
        "an export of a kind that is none",
        "skirl export checkpoints rows.csv",
        "skirl export: --out is rows.csv: name a file that ends with .safetensors, .pt or .parquet",
    ),
    M(
        "an export of a table that is none",
        "skirl export checkpoints rows.pt --table items",
        "skirl export: there is no table 'items': name one of 'item'",
    ),
    M(
        "an export of a damaged checkpoint",
        "skirl export damaged rows.pt",
        "skirl export: damaged/dense-.../model.safetensors is damaged, its checksum differs: use another checkpoint",
    ),
    M(
        "an import of no file",
        "skirl import bad.pt new",
        "skirl import: bad.pt does not exist: name a file, or a folder of checkpoints",
    ),
    M(
        "an import of a table that is none",
        "skirl import weights.pt new --tables items",
        "skirl import: weights.pt has no table 'items', it has item: set --tables to some of these, or set "
        "--prefix to what stands before the tables' names in the file",
    ),
    M(
        "an import of no tables",
        "skirl import notes.txt new",
        "skirl import: notes.txt is not a state dict that torch.load(weights_only=True) can read (...): name a file"
        " that torch.save or skirl export wrote, or a .safetensors",
    ),
    M(
        "16 bits against the reference",
        "skirl verify --dtype bfloat16 --device cuda",
        "skirl verify: --dtype is 'bfloat16': the reference rounds nothing to 16 bits, leave --dtype out",
    ),
    M(
        "a trace without a batch",
        "skirl bench traffic --trace ids.npy",
        "skirl bench traffic: --batch is missing: add --batch INT (accesses in a batch; a last, shorter batch is dropped)",
    ),
    M(
        "rows over several stores asked of the plan of tables",
        "skirl place --stores memory disk:rows",
        "skirl place: there is no flag --stores: skirl place plans tables for TorchRec; rows over several stores: write a "
        "plan for --store placed:PLAN.json by hand",
    ),
    M(
        "a benchmark asked of the command",
        "skirl bench train --json",
        "skirl: 'bench' is not a command: benchmarks are scripts: run `python benchmarks/NAME.py` in a checkout of skirl's"
        " repository",
    ),
    M(
        "a table without rows",
        'skirl.Table("item", rows=0, dim=4)',
        "table 'item': rows is 0, set it between 1 and 2**48",
    ),
    M(
        "a table without numbers",
        'skirl.Table("item", rows=10, dim=0)',
        "table 'item': dim is 0, set it to 1 or more",
    ),
    M(
        "rows that are a float",
        'skirl.Table("item", rows=1e6, dim=4)',
        "table 'item': rows is 1000000.0, set it to an int",
    ),
    M(
        "a pooling that is none",
        'skirl.Table("item", rows=10, dim=4, pooling="max")',
        "table 'item': pooling is 'max', set it to 'sum' or 'mean'",
    ),
    M(
        "one feature as a text",
        'skirl.Table("item", rows=10, dim=4, features="clicked")',
        "table 'item': features is a str, set it to a tuple: ('clicked',)",
    ),
    M(
        "no tables",
        "skirl.EmbeddingBagCollection([], optimizer=skirl.SGD(lr=0.1), cache=8)",
        "no tables given: pass at least one skirl.Table",
    ),
    M(
        "two tables of one name",
        "rows(tables[0], tables[0])",
        "table 'item' is given twice: give each its own name",
    ),
    M(
        "an optimizer of torch",
        "rows(optimizer=torch.optim.SGD)",
        "optimizer is the class torch.optim.sgd.SGD: rows have their own, set it to one such as "
        "skirl.SGD(lr=0.1), skirl.Adagrad, skirl.RowwiseAdagrad, skirl.Adam or skirl.FTRL",
    ),
    M(
        "a learning rate below 0",
        "skirl.SGD(lr=-1)",
        "SGD: lr is -1, set it to a finite number, 0 or more",
    ),
    M(
        "a beta of 1",
        "skirl.Adam(lr=0.1, betas=(0.9, 1.0))",
        "Adam: betas is (0.9, 1.0), set both to 0 or more and below 1",
    ),
    M(
        "first values that are no numbers",
        'skirl.Uniform(float("nan"))',
        "Uniform: bound is nan, set it to a finite number, 0 or more",
    ),
    M(
        "a cache of 0 rows",
        "rows(cache=0)",
        "cache is 0 rows: set it to 1 or more",
    ),
    M(
        "a cache as a float",
        "rows(cache=0.1)",
        "cache is a float: set it to a number of rows, a share like '10%', a size like '4GiB' or 'auto'",
    ),
    M(
        "a store that is none in Python",
        'rows(store="redis://host")',
        "store 'redis://host' is not known, set it to 'memory', 'disk:FOLDER', 'rpc://HOST:PORT', 'placed:PLAN.json', "
        "'checkpoint' or pass a skirl.store.Store",
    ),
    M(
        "a folder of another kind as a store",
        'rows(store="disk:runs")',
        "the store's folder runs holds other files, such as ...: name a new or an empty folder",
    ),
    M(
        "half precision on a CPU in Python",
        "rows(dtype=torch.bfloat16)(batch())",
        "rows of torch.bfloat16 can only be trained on a GPU: set device='cuda', or dtype=torch.float32",
    ),
    M(
        "a dtype that is none",
        "rows(dtype=torch.int8)",
        "dtype is torch.int8: set it to torch.float32 or torch.float64, or on a GPU to torch.bfloat16 or torch.float16",
    ),
    M(
        "a device that is none",
        'rows(device="gpu")',
        "device is 'gpu': set it to 'cpu', 'cuda' or 'cuda:N' (or 'interpret', to test the GPU's code without one)",
    ),
    M(
        "rows of a store used without saying so",
        'one = rows(store="disk:store"); train(model=one); one.close(); rows(store="disk:store")',
        "the store DiskStore('store') already holds 2 rows: pass resume=True to go on with them (on the command line: "
        "--resume and --save), or set store to an empty one",
    ),
    M(
        "lengths and offsets",
        'skirl.KeyedJagged(["a"], torch.tensor([1]), lengths=torch.tensor([1]), offsets=torch.tensor([0, 1]))',
        "KeyedJagged: lengths and offsets are both given, pass one of the two",
    ),
    M(
        "columns that are no features",
        'skirl.KeyedJagged.one_hot(["a", "b"], torch.tensor([[1, 2, 3]]))',
        "KeyedJagged.one_hot: ids has 3 columns for 2 features (a, b): pass a column for each",
    ),
    M(
        "an id below 0",
        "train([batch(-1, 2)])",
        "batch 0, feature 'item', sample 0: id -1 is outside table 'item', which has rows 0 to 9: map ids to "
        "these, or make the table as large",
    ),
    M(
        "an id beyond its table",
        "train([batch(1, 20)])",
        "batch 0, feature 'user', sample 0: id 20 is outside table 'user', which has rows 0 to 19: map ids to"
        " these, or make the table as large",
    ),
    M(
        "ids that are floats",
        'train([skirl.KeyedJagged(["item", "user"], torch.tensor([1.0, 2.0]), lengths=torch.tensor([1, 1]))])',
        "batch 0: ids are float32: pass int64 or int32",
    ),
    M(
        "ids of two dimensions",
        'train([skirl.KeyedJagged(["item", "user"], torch.tensor([[1, 2]]), lengths=torch.tensor([1, 1]))])',
        "batch 0: ids have shape [1, 2]: pass one dimension",
    ),
    M(
        "a feature that is not there",
        'train([batch(keys=("item", "users"))])',
        "batch 0: the batch has no feature 'user': it has 'item', 'users'; give it one of that name, or set "
        "the table's features to names that it has",
    ),
    M(
        "lengths that are too short",
        'train([skirl.KeyedJagged(["item", "user"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1]))])',
        "batch 0: offsets must rise from 0 to the number of ids (3); they run from 0 to 2: pass lengths whose"
        " sum is the number of ids, or such offsets",
    ),
    M(
        "weights that are too few",
        "train([batch(weights=torch.ones(1))])",
        "batch 0: 1 weights for 2 ids: pass one for each id",
    ),
    M(
        "batches that are tuples",
        "train([(batch(), 1)], sparse=lambda b: b.sparse)",
        "the loader yields a tuple, which has no attribute sparse: tell lookahead where its ids are with "
        "sparse=lambda batch: ...",
    ),
    M(
        "batches that are ids themselves",
        "with skirl.lookahead([batch()], rows()) as batches: next(iter(batches))",
        "the loader yields a KeyedJagged, which has no attribute sparse: tell lookahead where its ids are "
        "with sparse=lambda batch: batch",
    ),
    M(
        "a model without embeddings",
        "skirl.lookahead([batch()], nn.Linear(2, 1))",
        "the model has no skirl collection: give it a skirl.EmbeddingBagCollection or a skirl.EmbeddingCollection",
    ),
    M(
        "a lookahead that is not open",
        "next(iter(ahead()))",
        "the lookahead is not open: write `with skirl.lookahead(...) as batches:` around the loop over it",
    ),
    M(
        "an iterator read twice",
        'train(iter([batch()]), depth="epoch")',
        'depth="epoch" reads the loader twice, and this one is an iterator: pass a list or a DataLoader, or '
        'use depth="auto"',
    ),
    M(
        "a depth of 0",
        "ahead(depth=0)",
        "depth is 0: set it to 1 or more",
    ),
    M(
        "micro-batches of 0",
        "ahead(accumulate=0)",
        "accumulate is 0: set it to 1 or more micro-batches",
    ),
    M(
        "shards that make no tree",
        "ahead(shards=6)",
        "shards is 6: set it to a power of two, such as 4 or 8",
    ),
    M(
        "a batch that shards do not divide",
        "skirl train --batch 100 --shards 8",
        "skirl train: --batch is 100 and --shards is 8: set --batch to a multiple of shards, such as 96",
    ),
    M(
        "no patience",
        "ahead(patience=0)",
        "patience is 0: set it to seconds above 0, or to float('inf')",
    ),
    M(
        "a policy that is none",
        'ahead(policy="fifo")',
        "policy is 'fifo': set it to one of lfu, lru, min, ttl",
    ),
    M(
        "a model in eval mode",
        "train(model=rows().eval())",
        "the model is in eval mode, and a lookahead moves rows and trains them: call model.train() first. To "
        "evaluate, iterate over the loader itself: in eval mode the model looks rows up and changes nothing",
    ),
    M(
        "two lookaheads at once",
        "with ahead(model=one), ahead(model=one): pass",
        "another lookahead over these embeddings is open: leave its with-block first, or call "
        "embeddings.lookahead.close()",
    ),
    M(
        "forward outside of the loop",
        "with ahead(model=one): one(batch())",
        "no batch is current: run forward on the batch that the lookahead yielded last, inside its loop",
    ),
    M(
        "forward after backward",
        'with ahead(model=one) as batches: [(one(ids)["item"].sum().backward(), one(ids)) for ids in batches]',
        "the batch in the loop had its backward, which ends its lookups: look all of it up before, and sum "
        "the losses. For a second look use model.eval() or torch.no_grad(); for micro-batches use "
        "lookahead(accumulate=k)",
    ),
    M(
        "forward of the batch before",
        "with ahead([batch(1, 2), batch(3, 4)], one) as batches: (nxt := iter(batches), prev := next(nxt), "
        "next(nxt), one(prev))",
        "forward takes the batch that the lookahead yielded last, and got the one before it: anything that reads "
        "a batch ahead (Lightning, a double-buffered loop) must wrap the loader, inside the lookahead, not the lookahead "
        "itself, which already fetches rows ahead",
    ),
    M(
        "forward of another batch",
        "with ahead(model=one) as batches: [one(batch(3, 4)) for ids in batches]",
        "forward takes the batch that the lookahead yielded last, and got other ids of feature 'item': rows "
        "were brought for the ids that it yielded. Change ids before the lookahead reads them: in the "
        "Dataset, in collate_fn, or in lookahead(sparse=...). To leave ids out in the loop, pass weights that"
        " are 0 for them",
    ),
    M(
        "backward twice",
        'loss = one(batch())["item"].sum(); loss.backward(retain_graph=True); loss.backward()',
        "backward ran twice over one batch: its rows were already updated. Sum the losses and call it once",
    ),
    M(
        "backward after the next batch",
        'with ahead(model=one) as batches: outs = [one(ids)["item"] for ids in batches]; outs[0].sum().backward()',
        "backward of a batch that is not current any more: its rows may have left the cache. Call backward "
        "before the next batch is taken, and before skirl.save; several lookups of one batch need a "
        "skirl.lookahead",
    ),
    M(
        "a batch larger than the cache",
        "train([batch(1, 2, 3, 4, 5, 6, 7, 8)], model=rows(cache=4))",
        "cache 4 is 4 rows, batch 0 needs 8: set cache to 8 or more, or use smaller batches; `skirl size` "
        "says what a whole run needs",
    ),
    M(
        "an epoch with a batch larger than the cache",
        'train([batch(1, 2), batch(1, 2, 3, 4, 5, 6, 7, 8)], model=rows(cache=4), depth="epoch")',
        "cache 4 is 4 rows, batch 1 needs 8, the most of the whole run: set cache to 8 or more, or use smaller batches",
    ),
    M(
        "a GradScaler that rows do not know",
        'scaler = torch.amp.GradScaler("cpu"); scaler.scale(one(batch())["item"].sum()).backward(); '
        "scaler.step(one.optimizer)",
        "scaler.step(embeddings.optimizer): no gradient of the rows was unscaled. If they are frozen, leave this out; "
        "otherwise they do not know this GradScaler, and were trained with scaled gradients: pass it to the "
        "embeddings, EmbeddingBagCollection(..., grad_scaler=scaler), or set embeddings.grad_scaler = scaler before "
        "the first backward",
    ),
    M(
        "embeddings that are copied",
        "copy.deepcopy(one)",
        "embeddings cannot be copied or pickled: their rows live in a cache and a store. Make new ones; rows "
        "go from one to the other by skirl.save and skirl.load",
    ),
    M(
        "embeddings that are closed",
        "one.close(); one(batch())",
        "these embeddings are closed: make new ones, with resume=True if the store has kept its rows",
    ),
    M(
        "a state dict of other tables",
        "rows().load_state_dict(rows(tables[0]).state_dict())",
        "the state was saved with another store's rows: its identity is ..., here it is .... Rows are not in "
        "a state_dict: save and load them together with skirl.save and skirl.load. To load the rest alone, "
        "leave the key that ends with '_extra_state' out and pass strict=False",
    ),
    M(
        "a feature of the output that is none",
        'rows()(batch())["items"]',
        "no feature 'items': take one of 'item', 'user'",
    ),
    M(
        "vectors of two dims stacked",
        'rows(tables[0], skirl.Table("user", 20, 8))(batch()).stacked()',
        "stacked() needs tables of one dim, these have [4, 8]: take the features one by one",
    ),
    M(
        "a save of no optimizer list",
        'skirl.save("new", model=rows(), optimizers=torch.optim.SGD([torch.zeros(1)], 0.1))',
        "optimizers is one SGD: pass a list of them, optimizers=[...]",
    ),
    M(
        "a load out of nothing",
        'skirl.load("bare", model=rows())',
        "bare holds no checkpoint: give a folder that skirl.save or `skirl train --save` has written",
    ),
    M(
        "a load into other tables",
        'skirl.load("checkpoints", model=rows())',
        "checkpoints/checkpoint-000001.json has the tables 'item', this model 'item', 'user': make them as "
        "they were saved",
    ),
    M(
        "a load into another optimizer",
        'skirl.load("checkpoints", model=rows(tables[0], optimizer=skirl.Adam(lr=0.1)))',
        "checkpoints/checkpoint-000001.json was saved with table 'item'.optimizer = 'SGD', here it is "
        "'Adam': set it to what was saved",
    ),
    M(
        "a load of a damaged checkpoint",
        'skirl.load("damaged", model=rows(tables[0]))',
        "damaged/rows/cache-....safetensors is damaged at its beginning: use another checkpoint",
    ),
    M(
        "a save over a file",
        'skirl.save("notes.txt", model=rows())',
        "notes.txt is a file: a checkpoint is a folder, name another",
    ),
    M(
        "rows out of no file",
        'skirl.import_rows(rows(), "bad.pt")',
        "bad.pt does not exist: name a file, or a folder of checkpoints",
    ),
    M(
        "rows of another shape",
        'skirl.import_rows(rows(), "weights.pt")',
        "item.weight is [5, 3] in weights.pt, table 'item' is [10, 4]: make the table as large, or name the "
        "tensor that is meant by names={TABLE: NAME}",
    ),
    M(
        "an export of a table that is none in Python",
        'skirl.export(rows(), "rows.safetensors", "items")',
        "there is no table 'items': name one of 'item', 'user'",
    ),
    M(
        "a bag with max_norm",
        "skirl.EmbeddingBag(10, 4, max_norm=1.0, cache=5, optimizer=skirl.SGD(lr=0.1))",
        "max_norm is not supported, it changes rows where they are looked up: leave it out, or clip gradients"
        " by the optimizer's clip",
    ),
    M(
        "a bag that takes the maximum",
        'skirl.EmbeddingBag(10, 4, mode="max", cache=5, optimizer=skirl.SGD(lr=0.1))',
        "mode is 'max': set it to 'sum' or 'mean'",
    ),
    M(
        "offsets for ids of two dimensions",
        "skirl.EmbeddingBag(10, 4, cache=5, optimizer=skirl.SGD(lr=0.1))(torch.tensor([[1, 2]]), torch.tensor([0]))",
        "offsets are for a one-dimensional input, and input is [1, 2]: leave them out, each row of input is a bag",
    ),
    M(
        "a model of two dims",
        'skirl.models.DLRM(rows(tables[0], skirl.Table("user", 20, 8)), dense_features=1, bottom=(8,), top=(8,))',
        "DLRM takes vectors of one dim, tables have dims [4, 8]: set one dim for all tables",
    ),
    M(
        "dense features that the model has not",
        "skirl.models.DLRM(rows(), dense_features=2, bottom=(8,), top=(8,))(skirl.Batch(torch.zeros(1, 3), "
        "batch(), torch.zeros(1)))",
        "DLRM was made for 2 dense features, the batch has 3: set dense_features=3",
    ),
    M(
        "a flag as another type",
        'Recipe.of(data="synthetic:tiny", batch="64")',
        "batch is '64', a str: set it to a whole number",
    ),
    M(
        "a flag that is none in Python",
        "Recipe.of(rwos=5)",
        "Recipe has no flag 'rwos' (did you mean 'rows'?): set some of data, batch, epochs, steps, valid, "
        "seed, data_seed, rows_scale, pooling_factor, per_session, change, lists, drift, schema, rows, vocab, admit, stale, "
        "shuffle, "
        "session_order, most_rows, mix, repeats, workers, bad_rows, model, dim, bottom, top, deep, rows_in_deep, dropout, "
        "cross, rank, structure, activation, width, heads, layers, newest, target, optimizer, lr, dense_lr, "
        "schedule, warmup, shards, cache, depth, policy, store, prefetch, peer_patience, device, dtype, "
        "threads",
    ),
    M(
        "flags where their parts go",
        'Recipe(data="synthetic:tiny")',
        "data is 'synthetic:tiny', a str: pass each flag by its name, with Recipe.of(NAME=VALUE, ...), or set data "
        "to a DataFlags, which holds data, batch, epochs, steps, valid, seed, data_seed, rows_scale, pooling_factor, "
        "per_session, "
        "change, lists, drift, schema, rows, vocab, admit, stale, shuffle, session_order, most_rows, mix, repeats, "
        "workers, bad_rows",
    ),
    M(
        "a part of a flag as a float",
        'DataFlags("synthetic:tiny", steps=1.5)',
        "steps is 1.5, a float: set it to a whole number",
    ),
    M(
        "neither lengths nor offsets",
        'skirl.KeyedJagged(["a"], torch.tensor([1]))',
        "KeyedJagged: neither lengths nor offsets is given, pass one of the two",
    ),
    M(
        "a feature twice",
        'train([batch(keys=("item", "item"))])',
        "batch 0: the batch names feature 'item' twice: give each its own name",
    ),
    M(
        "lengths below 0",
        'train([skirl.KeyedJagged(["item", "user"], torch.tensor([1, 2]), lengths=torch.tensor([3, -1]))])',
        "batch 0: offsets must rise from 0 to the number of ids (2); they run from 0 to 2 and fall on the "
        "way: a length is negative, pass lengths of 0 or more",
    ),
    M(
        "an optimizer by its name",
        'rows(optimizer="sgd")',
        "optimizer is a str: rows have their own, set it to one such as skirl.SGD(lr=0.1), skirl.Adagrad, "
        "skirl.RowwiseAdagrad, skirl.Adam or skirl.FTRL",
    ),
    M(
        "another batch in forward",
        "with ahead(model=one) as batches: [one(batch(1, 2, 3, 4)) for _ in batches]",
        "forward takes the batch that the lookahead yielded last, whole: it has 1 sample, and forward got 2: "
        "pass that batch unchanged",
    ),
    M(
        "ids that are a list",
        "train([[1, 2]])",
        "batch 0: ids are a list, which has no keys(): pass a KeyedJagged or a KeyedJaggedTensor, or tell "
        "lookahead where it is with sparse=lambda batch: ...",
    ),
    M(
        "a prefetch below 0",
        "ahead(prefetch=-1)",
        "prefetch is -1: set it between 0 and 1024 steps",
    ),
    M(
        "an epoch in another order",
        'train(model=one, loader=Drawn(), depth="epoch")',
        'depth="epoch": batch 0 has other ids than in the first pass. The loader must yield the same batches '
        "in the same order each time; fix its seed, or use depth='auto'",
    ),
    M(
        "frequencies as a scale",
        "skirl.EmbeddingBag(10, 4, scale_grad_by_freq=True, cache=5, optimizer=skirl.SGD(lr=0.1))",
        "scale_grad_by_freq is not supported: leave it out, and use Adagrad for frequent ids",
    ),
    M(
        "a padding row outside",
        "skirl.EmbeddingBag(10, 4, padding_idx=10, cache=5, optimizer=skirl.SGD(lr=0.1))",
        "padding_idx is 10: set it to a row from 0 to 9",
    ),
    M(
        "weights for means",
        "skirl.EmbeddingBag(10, 4, cache=5, optimizer=skirl.SGD(lr=0.1))(torch.tensor([[1, 2]]), "
        "per_sample_weights=torch.ones(1, 2))",
        "per_sample_weights need mode='sum', and mode is 'mean': set mode to 'sum', or leave the weights out",
    ),
    M(
        "a seed below 0",
        "rows(seed=-1)",
        "seed is -1: set it between 0 and 2**63 - 1",
    ),
    M(
        "labels of several columns",
        "skirl.models.DLRM(rows(), dense_features=1, bottom=(8,), top=(8,)).loss(skirl.Batch(torch.zeros(1, "
        "1), batch(), torch.zeros(1, 2)))",
        "DLRM predicts one number a sample, and labels have shape [1, 2]: pass labels of shape [1], one label a sample",
    ),
    M(
        "an optimizer without a state",
        'skirl.save("new", model=rows(), optimizers=[0.1])',
        "optimizers[0] is a float: pass what has state_dict and load_state_dict",
    ),
    M(
        "a save that keeps none",
        'skirl.save("new", model=rows(), keep=0)',
        "keep is 0: set it to 1 or more checkpoints",
    ),
    M(
        "a vocabulary's rows that no file has",
        "skirl vocab --data csv:good.csv --schema row.toml --out ids.vocab",
        'skirl vocab: every id column holds rows already, not ids (encode = "row" in the schema): there is nothing '
        "to make a vocabulary of, train without one",
    ),
    M(
        "nothing to size in an empty file",
        "skirl size csv:empty.csv --schema s.toml --quiet",
        "skirl size: empty.csv is empty: remove it, or get it again",
    ),
    M(
        "a malformed row left out, and no other",
        "skirl train --data csv:label2.csv --schema s.toml $QUIET --bad-rows skip",
        "skirl train: label2.csv: there are no rows left to read (left out: 1 malformed row: line 2 of label2.csv): "
        "give other files, fix the malformed rows, or hold out less",
    ),
    M(
        "a log every 0 steps",
        "skirl train $TINY --log-every 0",
        "skirl train: --log-every is 0: set it to 1 or more steps",
    ),
    M(
        "a warmup below 0",
        "skirl train --warmup -1",
        "skirl train: --warmup is -1: set it to 0 steps or more",
    ),
    M(
        "a learning rate of no number",
        "skirl train --lr fast",
        "skirl train: --lr is 'fast': set it to a number",
    ),
    M(
        "a learning rate near the end of float32",
        "skirl train --dense-lr 3e38",
        "skirl train: --dense-lr is 3e+38: set it to a number from 0 to 1e+37",
    ),
    M(
        "an optimizer of torch over rows",
        "torch.optim.Adam(one.parameters()).step()",
        "torch.optim.Adam was given only the parameters of embeddings, which hold no rows: rows have their own optimizer, "
        "EmbeddingBagCollection(..., optimizer=skirl.Adam(lr=...)), and backward applies it. Give torch's the parameters of "
        "the whole model, or leave it out",
    ),
    M(
        "a converted file that is there",
        f"skirl convert {CSV} --out notes.txt",
        "skirl convert: --out is notes.txt, which already exists: name another file, or add --force to replace it",
    ),
    M(
        "an export that is there",
        "skirl export checkpoints weights.pt",
        "skirl export: --out is weights.pt, which already exists: name another file, or add --force to replace it",
    ),
    M(
        "a table in two collections",
        "train(model=nn.ModuleList([rows(), rows()]))",
        "two collections of the model, '0' and '1', have a table 'item' of 10 rows and dim 4, and each would train rows of "
        "its own. To share them, make one EmbeddingCollection with the features of both, and give each module a part of "
        'it: collection.part("item", pooled="sum"). To keep them apart, give one another name',
    ),
    M(
        "a hash with its table first",
        'skirl.Hashed("item", 1000)',
        "Hashed('item', 1000): the number of rows comes first, then the table's name: write Hashed(1000, \"item\")",
    ),
    M(
        "a part that is no feature",
        'one.part("items")',
        "no feature 'items' in this collection: name some of 'item', 'user'",
    ),
    M(
        "bags pooled once more",
        'one.part("item", pooled="mean")',
        "pooled is 'mean', and an EmbeddingBagCollection pools as its tables say: leave pooled out, or make one "
        "EmbeddingCollection, whose parts have bags or sequences",
    ),
    M(
        "a part of a batch without its feature",
        'one.part("item", "user")(batch().select(["item"]))',
        "the batch has no feature 'user', which this part looks up, it has 'item': pass it the batch as it was yielded",
    ),
    M(
        "seconds for a step",
        "skirl size synthetic:tiny --step-ms 5ms",
        "skirl size: --step-ms is '5ms': set it to a number",
    ),
]


DO = re.compile(
    r"\b(add|call|did you mean|fix|get|give|install|iterate|leave|make|map|mend|name|pass|run|set|take|tell|unpack|use|write"
    r"|--help lists|must wrap)\b|for instance"
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
