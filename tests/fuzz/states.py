"""Targets other than data: schema files, vocabularies, positions of streams, open vocabularies, run folders."""

import json
import math
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from skirl.core.placement import Cut, PlacedTable, PlacementPlan, Site
from skirl.data import DataFlags
from skirl.data.files.find import BadSchema
from skirl.data.files.hashing import GOOD, NONE
from skirl.data.files.schema import BUILT_IN, FileSchema
from skirl.data.files.stream import Files
from skirl.data.vocabulary import vocabulary as vocabularies
from skirl.data.vocabulary.growing import Growing
from skirl.data.vocabulary.vocabulary import BadVocabulary
from tests.data.logs import criteo_rows, number_hash, write_parquet, write_tsv
from tests.fuzz import plain, tables, texts
from tests.fuzz.loop import READ, REFUSED, Target, clean
from tests.fuzz.mutate import TEXTS, Draw, mutated, mutated_json, mutated_safetensors, mutated_text, mutated_tree


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
    kinds = {
        "F32": "<f4",
        "F64": "<f8",
        "I64": "<i8",
        "U64": "<u8",
        "U8": "u1",
        "I32": "<i4",
        "BOOL": "?",
        "F16": "<f2",
    }
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
        facts = vocabularies.Facts({"a": "texts", "b": "hex", "c": "numbers"}, 3, 1000, {"x": (0.5, 2.0)})
        made = {
            name: (rng.integers(1, 1 << 63, n, np.uint64), np.arange(n, 0, -1))
            for name, n in [("a", 40), ("b", 0), ("c", 3)]
        }
        vocabularies.save(str(folder / "file"), facts, made)
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
        assert found.facts.types == facts["types"]
        assert {name: list(pair) for name, pair in found.facts.means.items()} == {
            name: list(map(float, pair)) for name, pair in facts["means"].items()
        }
        for table in facts["types"]:
            keys = tensors[f"{table}.keys"]
            assert found.rows[table] == len(keys) + 2
            expected: dict[int, int] = {}
            for i, key in enumerate(keys.tolist()):
                expected.setdefault(key, i + 2)
            asked = np.concatenate([keys, np.array([0, 1, 7, 1 << 63], np.uint64)])
            kinds = np.full(len(asked), GOOD, np.uint8)
            rows = found(table, asked, kinds).tolist()
            assert rows == [expected.get(key, 1) for key in asked.tolist()]
            assert found(table, asked, np.full(len(asked), NONE, np.uint8)).tolist() == [0] * len(asked)
        return READ


class State(Target):
    """The position of a stream over files."""

    name = "stream-state"
    batch, epochs = 7, 2

    def prepare(self, folder: Path) -> None:
        self._folder = folder
        parts = [criteo_rows(30, 1), criteo_rows(25, 2), criteo_rows(20, 3)]
        write_tsv(folder / "day_0", parts[0])
        write_tsv(folder / "day_1", parts[1], packed=True)
        write_parquet(folder / "day_2", parts[2], group=8)
        self._rows = [row for part in parts for row in part]
        files = self._open()
        self._seeds = []
        for _ in files:
            self._seeds.append(json.loads(json.dumps(files.state_dict())))
        begins, at = {}, 0
        for part in files.dataset.parts():
            begins[part.file, part.part] = at
            at += files.dataset._file(part.file).rows(part.part)
        self._begins = begins
        schema = BUILT_IN["criteo"]
        rows = schema.rows_of(str(texts.ROWS))
        named = [dict(zip(schema.text.columns, (x.encode() for x in row))) for row in self._rows]
        self._samples = [plain.read_row(row, schema, rows) for row in named]

    def _open(self) -> Files:
        flags = DataFlags(f"criteo:{self._folder}", batch=self.batch, epochs=self.epochs, rows=str(texts.ROWS))
        return flags.files(700)

    def draw(self, draw: Draw, folder: Path) -> None:
        state = draw.choice(self._seeds)
        if draw.random() < 0.5:
            state = dict(state)
            for _ in draw.some():
                name = draw.choice(["epoch", "file", "part", "row", "window", "next", "batches"])
                state[name] = draw.choice([0, 1, 2, 3, 5, 9, 30, -1, 2**31, 2**63, 2**70, 1.5, "1", None, True])
        else:
            state = mutated_tree(draw, state)
        (folder / "state.json").write_text(json.dumps(state))

    def judge(self, folder: Path) -> str:
        state = json.loads((folder / "state.json").read_text())
        files = self._open()
        try:
            files.load_state_dict(state)
            found = plain.samples_of(list(files))
        except ValueError as error:
            assert "the state" in str(error) or "no rows left" in str(error), error
            return REFUSED
        plain.assert_equal(found, self._expected(state))
        return READ

    def _expected(self, state: dict[str, Any]) -> list[Any]:
        """Return all samples from the position on, except the batch that was already yielded."""
        file, part = state["file"], state["part"]
        after = [at for (f, p), at in self._begins.items() if (f, p) > (file, part)]
        beyond = min(after, default=len(self._samples))
        begin = self._begins.get((file, part))
        begin = beyond if begin is None else min(begin + state["row"], beyond)
        if state["next"] > 0:
            begin = min(len(self._samples), begin + self.batch)
        first = self._samples[begin:] if state["epoch"] < self.epochs else []
        return first + self._samples * max(0, self.epochs - 1 - state["epoch"])


class Open(Target):
    """An open vocabulary, with the position of its stream."""

    name = "open-vocabulary"
    admit, stale, rows, batch = 2, 6, 60, 5

    def prepare(self, folder: Path) -> None:
        toml = '[file]\ncolumns = ["y", "a", "b"]\n[[label]]\nname = "y"\n'
        toml += '[[id]]\nname = "a"\ntype = "int"\n[[id]]\nname = "b"\ntype = "int"\ntable = "a"\n'
        (folder / "schema.toml").write_text(toml)
        draw = Draw(4)
        self._rows = [(draw.randrange(2), int(draw.expovariate(0.2)), draw.randrange(15)) for _ in range(720)]
        (folder / "file").write_text("".join(f"{y},{a},{b}\n" for y, a, b in self._rows))
        self._folder = folder
        growing = self._open()
        self._seeds = []
        for i, _ in enumerate(growing):
            if i % 13 == 0:
                self._seeds.append(json.loads(json.dumps(growing.state_dict(), default=lambda array: array.tolist())))

    def _open(self) -> Growing:
        flags = DataFlags(
            f"csv:{self._folder / 'file'}", schema=str(self._folder / "schema.toml"), batch=self.batch, rows=str(self.rows),
            vocab="open", admit=self.admit, stale=self.stale,
        )  # fmt: skip
        stream = flags.stream()
        assert isinstance(stream, Growing)
        return stream

    def draw(self, draw: Draw, folder: Path) -> None:
        state = json.loads(json.dumps(draw.choice(self._seeds)))
        if draw.random() < 0.3:
            state = mutated_tree(draw, state)
        for _ in range(draw.randrange(3)):
            at = state.get("tables", {}) if isinstance(state.get("tables"), dict) else {}
            table = at.get("a")
            name = draw.choice(["keys", "rows", "counts", "last"])
            if isinstance(table, dict) and isinstance(table.get(name), list) and table[name]:
                array = table[name]
                array[draw.randrange(len(array))] = draw.choice(
                    [0, 1, 2, 11, 12, 59, 60, -1, 2**40, 2**63 - 1, draw.choice(array)]
                )
        (folder / "state.json").write_text(json.dumps(state))

    def judge(self, folder: Path) -> str:
        state = json.loads((folder / "state.json").read_text())
        growing = self._open()
        given = json.loads((folder / "state.json").read_text())
        if isinstance(given, dict) and isinstance(given.get("tables"), dict):
            others = given.get("admitted")
            for table in [*given["tables"].values(), others]:
                if isinstance(table, dict):
                    for name, value in table.items():
                        if isinstance(value, list) and all(type(x) is int and abs(x) < 1 << 63 for x in value):
                            table[name] = np.array(value, np.int64)
        try:
            growing.load_state_dict(given)
            batches = list(growing)
        except ValueError as error:
            assert "the state" in str(error) or "no rows left" in str(error), error
            return REFUSED
        found = [batch.sparse.values().tolist() for batch in batches]
        assert found == self._expected(state), "rows of another vocabulary"
        return READ

    def _expected(self, state: dict[str, Any]) -> list[list[int]]:
        """Return the same, computed with a dict."""
        table, files, mask = state["tables"]["a"], state["files"], (1 << 64) - 1
        held = {
            key & mask: [row, count, last]
            for key, row, count, last in zip(table["keys"], table["rows"], table["counts"], table["last"])
        }
        free, now = table["next"], files["batches"]
        begin = (
            files["row"] + (self.batch if files["next"] else 0)
            if files["part"] == 0 and files["file"] == 0
            else 1 << 60
        )
        out = []
        for at in range(begin, len(self._rows), self.batch) if files["epoch"] == 0 else []:
            now += 1
            if now % max(1, self.stale // 4) == 0:
                held = {key: entry for key, entry in held.items() if entry[2] >= now - self.stale}
            rows = []
            for feature in (1, 2):
                for row in self._rows[at : at + self.batch]:
                    entry = held.setdefault(number_hash(row[feature], "a"), [0, 0, 0])
                    entry[1], entry[2] = entry[1] + 1, now
                    if entry[0] == 0 and entry[1] >= self.admit and free < self.rows:
                        entry[0], free = free, free + 1
                    rows.append(entry[0] or 1)
            out.append(rows)
        return out[state["since"] :]


class RunFolder(Target):
    """The files that `skirl report` reads."""

    name = "run-folder"

    def prepare(self, folder: Path) -> None:
        from skirl.cli import main

        flags = "--data synthetic:tiny --model dlrm-tiny --dim 4 --batch 32 --steps 8 --valid 20%"
        out = folder / "run"
        more = ["--eval-every", "4", "--log-every", "2", "--cache", "100%", "--quiet", "--json", "--run", str(out)]
        if main(["train", *flags.split(), *more]):
            raise RuntimeError("the seed's run failed")
        self._seeds = {name: (out / name).read_bytes() for name in ("config.json", "metrics.jsonl", "result.json")}

    def draw(self, draw: Draw, folder: Path) -> None:
        (folder / "run").mkdir()
        for name, data in self._seeds.items():
            if name.endswith("l"):
                lines = data.splitlines()
                for _ in range(draw.randrange(3)):
                    i = draw.randrange(len(lines))
                    lines[i] = mutated_json(draw, lines[i])
                data = b"\n".join(lines) + b"\n"
                data = mutated(draw, data) if draw.random() < 0.2 else data
            elif draw.random() < 0.4:
                data = mutated_json(draw, data)
            if draw.random() > 0.03:
                (folder / "run" / name).write_bytes(data)

    def judge(self, folder: Path) -> str:
        from skirl.cli.commands import Report

        run = folder / "run"
        report = Report(run, page=folder / "page.html")
        try:
            found = report.run()
            report.summary(found)
        except ValueError as error:
            return clean(error, run, ValueError)
        data = (run / "metrics.jsonl").read_bytes() if (run / "metrics.jsonl").exists() else b""
        lines = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].split(b"\n") if line.strip()]
        train = [line for line in lines if line["kind"] == "train"]
        tests = [line for line in lines if line["kind"] == "eval"]
        assert found["steps"] == (train[-1]["step"] if train else 0)
        assert found["samples"] == (train[-1]["samples"] if train else 0)
        assert math.isclose(found["seconds"], sum(line["seconds"] for line in train), rel_tol=1e-9)
        losses = [line["test_logloss"] for line in tests]
        assert repr((found["best"] or {}).get("test_logloss")) == repr(min(losses) if losses else None)
        assert (folder / "page.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
        return READ


class Placement(Target):
    """The file of a placement, mostly without its digest. If it is read, it has every row once, as an independent
    reading says."""

    name = "placement"

    def prepare(self, folder: Path) -> None:
        sites = (Site("a", "disk:/x"), Site("b", rate=1e9), Site("c", memory=1 << 30))
        tables = [
            ("user", Cut.weighted([1, 2, 3])),
            ("item", Cut((0, 7, 90), (2, 0, 1), "rows")),
            ("tag", Cut((0,), (1,))),
        ]
        plan = PlacementPlan(sites, tuple(PlacedTable(name, 100, 4, cut, 20) for name, cut in tables))
        self._plan = json.loads(plan.text())

    def draw(self, draw: Draw, folder: Path) -> None:
        body = mutated_tree(draw, self._plan) if draw.random() < 0.8 else self._plan
        if draw.random() < 0.7 and isinstance(body, dict):
            body = {name: value for name, value in body.items() if name != "digest"}
        data = json.dumps(body).encode()
        (folder / "plan.json").write_bytes(mutated(draw, data) if draw.random() < 0.3 else data)

    def judge(self, folder: Path) -> str:
        path = folder / "plan.json"
        try:
            plan = PlacementPlan.load(path)
        except ValueError as error:
            return clean(error, folder, ValueError)
        body = json.loads(path.read_bytes())
        names = [site["name"] for site in body["sites"]]
        assert names == [site.name for site in plan.sites] and len(set(names)) == len(names)
        for number, table in enumerate(body["tables"]):
            if table["by"] == "hash":
                places = sorted((_whole_of(p["begin"]), _whole_of(p["end"])) for p in table["pieces"])
                assert places[0][0] == 0 and places[-1][1] == 1 << 64
                assert all(a[1] == b[0] for a, b in pairwise(places))
            for row in {0, 1, 6, 7, 89, 90, table["rows"] - 1} & set(range(min(table["rows"], 1 << 40))):
                found = names[plan.placement.site_of(np.array([number << 48 | row]))[0]]
                if table["by"] == "rows":
                    assert [found] == [p["site"] for p in table["pieces"] if p["begin"] <= row < p["end"]]
                assert found in [p["site"] for p in table["pieces"]]
        assert PlacementPlan.parsed(plan.text()) == plan
        return READ


def _whole_of(place: int | str) -> int:
    return place if isinstance(place, int) else int(place, 16)


TARGETS: list[Target] = [Schema(), Vocabulary(), State(), Open(), RunFolder(), Placement()]
