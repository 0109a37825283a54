"""From raw values to ids in a Dataset or a collate function: the same ids that the command makes from the same file."""

import csv
import pickle
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import skirl
from skirl.cli.files import Vocab
from skirl.data import DataFlags, encodings_of
from skirl.data.files.find import BadRow

BATCH = 16
SCHEMA = """
missing = ["", "NULL"]
nan_is_missing = true
[[label]]
name = "y"
[[id]]
name = "item"
[[id]]
name = "shop"
type = "hex"
rows = 50
[[id]]
name = "price"
type = "int"
rows = 70
[[id]]
name = "size"
type = "float"
[[id]]
name = "seen"
table = "item"
list = true
separator = "|"
[[id]]
name = "user"
type = "int"
encode = "row"
rows = 9
"""
NAMES = ["item", "shop", "price", "size", "seen", "user"]
COMMON: dict[str, Any] = {"missing": ("", "NULL"), "nan_is_missing": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a CSV file with missing values of every form, its schema, and a vocabulary of it."""
    path = tmp_path_factory.mktemp("raw")
    (path / "s.toml").write_text(SCHEMA)
    draw = random.Random(3)
    names = ["a17", "b", "käse", "NULL", "", "0", "x" * 20, *(f"i{n}" for n in range(12))]
    with (path / "d.csv").open("w") as file:
        print("y", *NAMES, sep=",", file=file)
        for _ in range(100):
            seen = "|".join(draw.choices(names, k=draw.randrange(5)))
            shop, price = (
                draw.choice(["", f"{draw.randrange(99):x}"]),
                draw.choice(["NULL", str(draw.randrange(-9, 99))]),
            )
            size = draw.choice(["", f"{draw.randrange(40)}.0", f"{draw.randrange(40)}"])
            print(draw.randrange(2), draw.choice(names), shop, price, size, seen, draw.randrange(9), sep=",", file=file)
    Vocab(data=f"csv:{path}/d.csv", out=f"{path}/ids.vocab", schema=f"{path}/s.toml", min_count=3, quiet=True).run()
    return path


class Lines(Dataset[dict[str, str]]):
    """The lines of a CSV file, read as anybody would. Ids of some columns are made here, in a worker."""

    def __init__(self, path: Path, encodings: dict[str, Any] | None = None) -> None:
        with path.open(newline="") as file:
            self.lines = list(csv.DictReader(file))
        self.encodings = encodings or {}

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: self.encodings.get(name, str)(value) for name, value in self.lines[i].items()}


class Collate:
    """Makes the ids of whole columns at once."""

    def __init__(self, encodings: dict[str, Any]) -> None:
        self.encodings = encodings

    def __call__(self, lines: list[dict[str, str]]) -> skirl.KeyedJagged:
        return skirl.KeyedJagged.of_bags({n: of([line[n] for line in lines]) for n, of in self.encodings.items()})


def gathered(lines: list[dict[str, Any]]) -> skirl.KeyedJagged:
    return skirl.KeyedJagged.of_bags({name: [line[name] for line in lines] for name in NAMES})


def of_the_command(folder: Path, **flags: Any) -> list[skirl.KeyedJagged]:
    return [
        b.sparse for b in DataFlags(f"csv:{folder}/d.csv", batch=BATCH, schema=f"{folder}/s.toml", **flags).stream()
    ]


def assert_equal(ours: Iterable[skirl.KeyedJagged], theirs: list[skirl.KeyedJagged]) -> None:
    count = 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        assert torch.equal(one.offsets(), other.offsets().to(torch.int64))
        assert torch.equal(one.values(), other.values().to(torch.int64))
        count += 1
    assert count == 7


def by_hash() -> dict[str, Any]:
    return {
        "item": skirl.Hashed(1000, "item", **COMMON),
        "shop": skirl.Hashed(50, "shop", type="hex", **COMMON),
        "price": skirl.Hashed(70, "price", type="int", **COMMON),
        "size": skirl.Hashed(1000, "size", type="float", **COMMON),
        "seen": skirl.Hashed(1000, "item", separator="|", **COMMON),
        "user": _whole,  # already a row
    }


def _whole(texts: Any) -> Any:
    return int(texts) if isinstance(texts, str) else [int(text) for text in texts]


def collated(folder: Path, encodings: dict[str, Any], **more: Any) -> DataLoader[Any]:
    return DataLoader(Lines(folder / "d.csv"), BATCH, collate_fn=Collate(encodings), **more)


def test_hashing_gives_the_ids_of_the_command_in_collate_and_in_getitem(folder: Path) -> None:
    theirs = of_the_command(folder, rows="1000,shop=50,price=70")
    assert_equal(collated(folder, pickle.loads(pickle.dumps(by_hash()))), theirs)
    assert_equal(DataLoader(Lines(folder / "d.csv", by_hash()), BATCH, collate_fn=gathered), theirs)


def test_a_vocabulary_gives_the_ids_of_the_command(folder: Path) -> None:
    path = folder / "ids.vocab"
    made = {name: skirl.InVocabulary(path, name, **COMMON) for name in ("item", "shop", "price")}
    made["size"] = skirl.InVocabulary(path, "size", type="float", **COMMON)
    made["seen"] = skirl.InVocabulary(path, "item", separator="|", **COMMON)
    made["user"] = _whole
    assert_equal(collated(folder, made), of_the_command(folder, vocab=str(path)))
    stream = DataFlags(f"csv:{folder}/d.csv", schema=f"{folder}/s.toml", vocab=str(path)).stream()
    assert {table.name: table.rows for table in stream.tables(4)}["item"] == made["item"].rows


@pytest.mark.parametrize("flags", [{"rows": "1000,price=30"}, {"vocab": "ids.vocab"}, {}], ids=str)
def test_the_schema_file_of_the_command_gives_all_at_once_also_in_workers(folder: Path, flags: dict[str, str]) -> None:
    if "vocab" in flags:
        flags = {"vocab": str(folder / flags["vocab"])}
    made = encodings_of(folder / "s.toml", **flags)
    assert list(made) == NAMES
    workers = {"num_workers": 1, "multiprocessing_context": "fork"} if "vocab" in flags else {}
    assert_equal(collated(folder, made, **workers), of_the_command(folder, **flags))


def test_a_schema_with_a_time_gives_its_encodings(tmp_path: Path) -> None:
    text = 'time = "t"\ntime_unit = "seconds"\n[[label]]\nname = "y"\n[[id]]\nname = "user"\nrows = 10\n'
    (tmp_path / "s.toml").write_text(text)
    assert encodings_of(tmp_path / "s.toml")["user"].rows == 10


def test_a_growing_vocabulary_gives_the_ids_of_the_command(folder: Path) -> None:
    types = {"item": "string", "shop": "hex", "price": "int", "size": "float"}
    rows = {"item": 30, "shop": 50, "price": 70, "size": 30}
    made: dict[str, Any] = {n: skirl.Grown(rows[n], n, type=kind, admit=3, **COMMON) for n, kind in types.items()}

    def seen(texts: list[str]) -> list[torch.Tensor]:
        bags = [[] if text in ("", "NULL") else text.split("|") for text in texts]
        return list(made["item"]([item for bag in bags for item in bag]).split([len(bag) for bag in bags]))

    encodings = {**made, "seen": seen, "user": _whole}
    theirs = of_the_command(folder, rows="30,shop=50,price=70", vocab="open", admit=3)
    assert_equal(collated(folder, {name: encodings[name] for name in NAMES}), theirs)
    known = made["item"].look_up(["a17", "never", None])
    assert known.tolist() == made["item"].look_up(["a17", "never", None]).tolist() and known[1:].tolist() == [1, 0]


def test_a_growing_vocabulary_goes_on_where_it_was_saved() -> None:
    draw = random.Random(0)
    values = [f"v{draw.randrange(20)}" for _ in range(200)]
    whole = skirl.Grown(15, "item", admit=3)
    expected = whole(values).tolist()
    first, second = skirl.Grown(15, "item", admit=3), skirl.Grown(15, "item", admit=3)
    begun = first(values[:90]).tolist()
    state = first.state_dict()
    first(values)  # later calls do not change a state
    second.load_state_dict(state)
    assert begun + second(values[90:]).tolist() == expected
    with pytest.raises(ValueError, match=r"^the vocabulary was grown with admit=3, here it is 4: set it to what it"):
        skirl.Grown(15, "item", admit=4).load_state_dict(state)


def test_a_growing_vocabulary_forgets_what_is_stale_as_the_command_does(folder: Path, tmp_path: Path) -> None:
    """One call per batch: without forgetting, or with another batch count, the ids would differ."""
    draw = random.Random(5)
    items = [f"v{draw.randrange(3 * (1 + n // 200), 25)}" for n in range(480)]
    (tmp_path / "d.csv").write_text("y,item\n" + "".join(f"1,{item}\n" for item in items))
    (tmp_path / "s.toml").write_text('[[label]]\nname = "y"\n[[id]]\nname = "item"\n')
    flags: dict[str, Any] = {"schema": f"{tmp_path}/s.toml", "rows": "40", "vocab": "open", "admit": 3}

    def command(stale: int | None) -> list[int]:
        stream = DataFlags(f"csv:{tmp_path}/d.csv", batch=8, stale=stale, **flags).stream()
        return [row for batch in stream for row in batch.sparse.values().tolist()]

    def grown(stale: int | None) -> list[int]:
        item = skirl.Grown(40, "item", admit=3, stale=stale)
        return [row for n in range(0, len(items), 8) for row in item(items[n : n + 8]).tolist()]

    assert len({tuple(command(stale)) for stale in (None, 3, 9)}) == 3
    for stale in (None, 9):
        assert grown(stale) == command(stale)
    state = skirl.Grown(40, "item", stale=9).state_dict()
    with pytest.raises(ValueError, match=r"^the vocabulary was grown with stale=9, here it is None: set it to what"):
        skirl.Grown(40, "item").load_state_dict(state)


@pytest.mark.parametrize("start", ["fork", "pickle"])
def test_a_growing_vocabulary_is_refused_in_worker_processes(start: str) -> None:
    item = skirl.Grown(100, "item")
    sentence = (
        "a Grown vocabulary is of one process, and each worker would give ids rows of its own: call it in the training"
    )
    if start == "pickle":
        with pytest.raises(TypeError, match=sentence):
            pickle.dumps(item)
        return
    loader = DataLoader(["a", "b"], 1, collate_fn=item, num_workers=1, multiprocessing_context="fork")  # pyright: ignore[reportArgumentType]
    with pytest.raises(RuntimeError, match=sentence):
        next(iter(loader))


def test_a_vocabulary_file_that_was_changed_is_refused_by_workers(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.vocab"
    copy.write_bytes((folder / "ids.vocab").read_bytes())
    pickled = pickle.dumps(skirl.InVocabulary(copy, "item"))
    Vocab(
        data=f"csv:{folder}/d.csv", out=f"{tmp_path}/new.vocab", schema=f"{folder}/s.toml", min_count=9, quiet=True
    ).run()
    copy.write_bytes((tmp_path / "new.vocab").read_bytes())
    with pytest.raises(ValueError, match=r"copy\.vocab: it was changed since the run opened it: put it back as it"):
        pickle.loads(pickled)


def test_values_may_be_a_list_an_array_a_tensor_or_arrow() -> None:
    price, item = skirl.Hashed(70, "price", type="int"), skirl.Hashed(70, "item")
    expected = price([3, -4, 3])
    for values in (("3", "-4", "3"), np.array([3, -4, 3], np.int16), torch.tensor([3, -4, 3]), pa.array([3, -4, 3])):
        assert torch.equal(price(values), expected)
    assert price(3) == price(np.int64(3)) == price(torch.tensor(3)) == expected[0] and isinstance(price(3), int)
    assert expected.dtype == torch.int64 and price([]).tolist() == [] == item([]).tolist()
    assert torch.equal(item(np.array(["a", "b"])), item([b"a", b"b"])) and item(None) == item("") == price(None) == 0


def test_steps_after_each_other_in_a_dataset_give_a_batch_that_trains() -> None:
    item, cut, default = skirl.Hashed(100, "item"), skirl.Longest(2), skirl.Default(0)
    assert skirl.Longest(2, keep="first")(("a", "b", "c")) == ("a", "b") and cut(np.arange(5)).tolist() == [3, 4]
    assert default([1, None, 2]) == [1, 0, 2] and default(torch.tensor([])).tolist() == [0] and cut(None) is None
    histories: list[list[str]] = [["a", "b", "c"], [], ["d"]]
    ids = skirl.KeyedJagged.of_bags({"item": [default(item(cut(history))) for history in histories]})
    assert ids.lengths().tolist() == [2, 1, 1] and ids.values().tolist() == [item("b"), item("c"), 0, item("d")]
    embeddings = skirl.EmbeddingBagCollection(
        [skirl.Table("item", item.rows, 4)], optimizer=skirl.SGD(lr=0.1), cache=10
    )
    embeddings(ids)["item"].sum().backward()
    assert embeddings.engine.counters.new == 4


def test_a_table_that_a_vocabulary_has_not_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"ids\.vocab: it has no table 'items': there are 'item', 'shop', 'price',"):
        skirl.InVocabulary(folder / "ids.vocab", "items")


def test_what_the_command_refuses_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("y,item,shop,price,size,seen,user\n1,a,g,1,1,a,3\n")
    with pytest.raises(BadRow, match="column shop is 'g'"):
        list(DataFlags(f"csv:{tmp_path}/bad.csv", schema=f"{folder}/s.toml", rows="1000").stream())
    with pytest.raises(ValueError, match=r"^shop: value 0 is 'g', expected 1 to 16 hexadecimal digits, or nothing"):
        encodings_of(folder / "s.toml")["shop"]("g")
    with pytest.raises(ValueError, match=r"^user: value 1 is '9', expected a row from 0 to 8"):
        encodings_of(folder / "s.toml")["user"](["3", "9"])
