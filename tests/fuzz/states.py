"""Targets of schema files and vocabularies."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from skirl.data.files.find import BadSchema
from skirl.data.files.schema import BUILT_IN, FileSchema
from skirl.data.vocabulary import vocabulary as vocabularies
from skirl.data.vocabulary.vocabulary import BadVocabulary
from tests.fuzz import tables, texts
from tests.fuzz.mutate import TEXTS, Draw, mutated, mutated_json, mutated_safetensors, mutated_text
from tests.fuzz.target import READ, Target, clean


class Schema(Target):
    """A schema file."""

    name = "schema"

    def prepare(self, folder: Path) -> None:
        seeds = [tables.SCHEMA, texts.CSV, *(schema.toml() for schema in BUILT_IN.values())]
        self._seeds = [seed.encode() for seed in seeds]

    def draw(self, draw: Draw, folder: Path) -> None:
        data = draw.choice(self._seeds)
        kind = draw.randrange(3)
        if kind == 0:
            data = mutated(draw, data, self._seeds)
        elif kind == 1:
            data = mutated_text(draw, data, draw.choice([b" = ", b" ", b'"']))
        else:
            lines = data.split(b"\n")
            for _ in draw.some():
                i = draw.randrange(len(lines))
                key = lines[i].partition(b"=")[0]
                value = draw.choice(
                    [*TEXTS, "[]", "{}", "true", "[1]", '["a", "b"]', "1e400", "-inf", "2014-01-01", '"""', "1_0"]
                )
                lines[i] = key + b"= " + value.encode()
            data = b"\n".join(lines)
        (folder / "schema.toml").write_bytes(data)

    def judge(self, folder: Path) -> str:
        import tomllib

        path = folder / "schema.toml"
        try:
            schema = FileSchema.load(str(path))
        except BadSchema as error:
            return clean(error, folder, BadSchema)
        assert FileSchema.parse(schema.toml()) == schema, "another schema when it is written and read again"
        read = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
        for kind, found in (("label", schema.labels), ("dense", schema.dense), ("id", schema.ids)):
            expected = [
                entry | {"name": name}
                for entry in read.get(kind, [])
                for name in (entry.get("names", None) if "names" in entry else [entry["name"]])
            ]
            assert len(found) == len(expected)
            for ours, theirs in zip(found, expected):
                assert all(getattr(ours, name) == value for name, value in theirs.items() if name != "names"), theirs
        assert all(_same(getattr(schema.text, name), value) for name, value in read.get("file", {}).items())
        return READ


def _same(ours: Any, theirs: Any) -> bool:
    return ours == (tuple(theirs) if isinstance(theirs, list) else theirs)


def safetensors_of(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return metadata and tensors (as uint8, float32, ... arrays) of a safetensors file, read by its format alone."""
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + n])
    metadata = header.pop("__metadata__", {}) or {}
    kinds = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "U8": "u1", "I32": "<i4", "I64": "<i8", "U64": "<u8"}
    kinds["BOOL"] = "?"
    found = {}
    for name, entry in header.items():
        a, b = entry["data_offsets"]
        raw = data[8 + n + a : 8 + n + b]
        if entry["dtype"] == "BF16":
            found[name] = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
        elif entry["dtype"] in kinds:
            found[name] = np.frombuffer(raw, kinds[entry["dtype"]]).reshape(entry["shape"])
    return metadata, found


class Vocabulary(Target):
    """A vocabulary file."""

    name = "vocabulary"

    def prepare(self, folder: Path) -> None:
        rng = np.random.default_rng(0)
        types = {"a": "texts", "b": "hex", "c": "numbers"}
        made = {name: rng.integers(1, 1 << 63, n, np.uint64) for name, n in [("a", 40), ("b", 0), ("c", 3)]}
        vocabularies.save(str(folder / "file"), types, 3, 1000, made)
        self._seed = (folder / "file").read_bytes()

    def draw(self, draw: Draw, folder: Path) -> None:
        data = self._seed
        if draw.random() < 0.3:  # the JSON inside the JSON
            n = struct.unpack("<Q", data[:8])[0]
            header = json.loads(data[8 : 8 + n])
            header["__metadata__"]["skirl"] = mutated_json(draw, header["__metadata__"]["skirl"].encode()).decode(
                "utf-8", "replace"
            )
            text = json.dumps(header).encode()
            data = struct.pack("<Q", len(text)) + text + data[8 + n :]
        else:
            data = mutated_safetensors(draw, data)
        (folder / "file").write_bytes(data)

    def judge(self, folder: Path) -> str:
        try:
            found = vocabularies.load(str(folder / "file"))
        except BadVocabulary as error:
            return clean(error, folder, BadVocabulary)
        metadata, tensors = safetensors_of((folder / "file").read_bytes())
        facts = json.loads(metadata["skirl"])
        assert found.types == facts["types"]
        for table in facts["types"]:
            keys = tensors[f"{table}.keys"]
            assert found.rows[table] == len(keys) + 2
            expected: dict[int, int] = {}
            for i, key in enumerate(keys.tolist()):
                expected.setdefault(key, i + 2)
            asked = np.concatenate([keys, np.array([0, 1, 7, 1 << 63], np.uint64)])
            rows = found(table, asked).tolist()
            assert rows == [expected.get(key, 1) if key else 0 for key in asked.tolist()]
        return READ


TARGETS: list[Target] = [Schema(), Vocabulary()]
