"""Targets of rows: checkpoints in memory and on disk, a disk store, imports.

The parsers behind the checksums: a case changes a header, a tensor or a record and seals it again, and the result of
loading must be what `plain_rows` reads from the files. That a checksum finds any damaged byte is shown elsewhere.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

import skirl
from skirl.checkpoint import folder as folders
from skirl.store.base import Record
from skirl.store.disk import records
from skirl.store.disk.store import DiskError, DiskStore
from skirl.tools.sealed_json import CheckpointError, seal
from tests.fuzz.mutate import Draw, mutated, mutated_safetensors, mutated_tree
from tests.fuzz.states import safetensors_of
from tests.fuzz.target import READ, Target, clean
from tests.store.conformance import contents
from tests.streams import used_rows

TABLES = [skirl.Table("a", 60, 4), skirl.Table("b", 40, 2)]
LAYOUT = {0: Record(8), 1: Record(4)}
HEADER = "checkpoint-000003.json"

Rows = dict[int, bytes]
"""Records by key."""


_IDS = (np.random.default_rng(7).random((12, 6, 2)) ** 2 * 40).astype(np.int64)
BATCHES = [skirl.KeyedJagged.one_hot(["a", "b"], torch.from_numpy(ids)) for ids in _IDS]


class Run:
    """A model, its optimizer and its batches."""

    def __init__(self, store: str) -> None:
        torch.manual_seed(0)
        rows = skirl.EmbeddingBagCollection(TABLES, optimizer=skirl.Adagrad(lr=0.1), cache=24, store=store, seed=3)
        self.model = torch.nn.ModuleDict({"rows": rows, "top": torch.nn.Linear(6, 1)})
        self.rows = rows
        self.dense = torch.optim.Adam(self.model["top"].parameters(), lr=0.01)
        self.batches = skirl.lookahead(BATCHES, self.model, sparse=lambda ids: ids, timeout=120)

    def whole(self) -> dict[str, Any]:
        return {"model": self.model, "optimizers": [self.dense], "data": self.batches}

    def step(self, ids: Any) -> None:
        out = self.rows(ids)
        self.model["top"](torch.cat([out["a"], out["b"]], dim=1)).square().sum().backward()
        self.dense.step()
        self.dense.zero_grad()

    def close(self) -> None:
        self.rows.engine.store.close()  # damaged files must not be flushed to

    def held(self) -> tuple[Rows, dict[str, bytes]]:
        """Return all rows, and the dense parameters."""
        dense = self.model["top"].state_dict()
        return used_rows(self.rows.engine), {name: value.numpy().tobytes() for name, value in dense.items()}


def train(folder: Path, store: str) -> None:
    """Save three checkpoints, each with only what changed since the one before, and keep the last."""
    run = Run(store)
    with run.batches as batches:
        for ids in batches:
            run.step(ids)
            if batches.step in (4, 5, 9):
                skirl.save(folder, **run.whole())
                rows, _ = run.held()  # with rows that were only planned ahead, which are not in the checkpoint
                saved = plain_rows(folder, body_of(folders.headers(folder)[0]))
                assert saved and all(rows[key] == row for key, row in saved.items())
    run.rows.close()


def plain_rows(folder: Path, body: Any) -> Rows:
    """Return the rows in a checkpoint's files, read by docs/checkpoints.md alone."""
    rows = body["parts"][0]["rows"]["rows"]
    cached = segments(folder / "rows", rows["cache"]["segments"])
    resident = segments(folder / "rows", rows["cache"]["resident"]) or cached
    return segments(folder / "rows", rows["store"]["segments"]) | {k: cached[k] for k in cached if k in resident}


def segments(folder: Path, entries: list[str]) -> Rows:
    """Return the rows in a disk store's segments."""
    found: Rows = {}
    for text in entries:
        name, width, _, count, *_ = text.split(" ")
        n, size = int(count), 4 * int(width)
        keys = np.frombuffer((folder / f"{name}.keys").read_bytes()[64 : 64 + 8 * n], np.int64)
        data = (folder / f"{name}.rows").read_bytes()[64:]
        found |= {int(key): data[i * (size + 4) : i * (size + 4) + size] for i, key in enumerate(keys)}
    return found


def resealed_segment(draw: Draw, folder: Path, text: str) -> str:
    """Change keys or rows of a segment, with its checksums. Return its new line for the manifest."""
    name, width, dtype, count, _, rows_bytes, keys_bytes = text.split(" ")
    n, words = int(count), int(width)
    keys_path, rows_path = folder / f"{name}.keys", folder / f"{name}.rows"
    raw_keys, raw_rows = keys_path.read_bytes(), rows_path.read_bytes()
    keys = np.frombuffer(raw_keys[64 : 64 + 8 * n], np.int64).copy()
    rows = np.frombuffer(raw_rows[64 : 64 + n * 4 * (words + 1)], np.uint32).reshape(n, words + 1)[:, :-1].copy()
    for _ in draw.some():
        i = draw.randrange(n)
        if draw.random() < 0.6:
            keys[i] = draw.choice(
                [0, -1, 39, 40, 59, 60, 1 << 40, 1 << 48, (1 << 48) | 39, (1 << 48) | 40, 2 << 48, int(keys[0])]
            )
        else:
            rows[i, draw.randrange(words)] = draw.getrandbits(32)
    out = np.empty(n * (words + 1), np.uint32)
    records.encode(rows.reshape(-1), words, keys, np.uint64(int(name, 16)), 0, out)
    state = int(records.hash_keys(keys, np.uint64(0)))
    for path, data in ((keys_path, raw_keys[:64] + keys.tobytes() + raw_keys[64 + 8 * n :]),
                       (rows_path, raw_rows[:64] + out.tobytes() + raw_rows[64 + out.nbytes :])):  # fmt: skip
        path.unlink()
        path.write_bytes(data)
    return f"{name} {width} {dtype} {count} {state:016x} {rows_bytes} {keys_bytes}"


def body_of(path: Path) -> Any:
    body = json.loads(path.read_bytes())
    body.pop("~sha256", None)
    return body


class Checkpoint(Target):
    """A folder of checkpoints."""

    def __init__(self, name: str, store: str) -> None:
        self.name, self._store = name, store

    def prepare(self, folder: Path) -> None:
        self._from = folder / "c"
        train(self._from, "memory" if self._store == "memory" else f"disk:{folder / 'rows'}")

    def draw(self, draw: Draw, folder: Path) -> None:
        copy = folder / "c"
        shutil.copytree(self._from, copy)
        header = copy / HEADER
        body = body_of(header)
        kind = draw.randrange(3)
        if kind == 0:
            part = draw.choice([None, None, "parts", "run", "model", "dense", "definition"])
            body = mutated_tree(draw, body) if part is None else body | {part: mutated_tree(draw, body[part])}
        elif kind == 1:
            path = copy / body["dense"]["file"]
            path.write_bytes(mutated_safetensors(draw, path.read_bytes()))
            body["dense"] |= {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        else:
            facts = body["parts"][0]["rows"]["rows"][draw.choice(["store", "cache"])]
            lines = facts[draw.choice([of for of in ("segments", "resident") if facts.get(of)])]
            i = draw.randrange(len(lines))
            lines[i] = resealed_segment(draw, copy / "rows", lines[i])
        resealed(header, body)

    def judge(self, folder: Path) -> str:
        copy = folder / "c"
        run = Run("memory" if self._store == "memory" else f"disk:{folder / 'own'}")
        try:
            try:
                skirl.load(copy, **run.whole())
            except ValueError as error:
                return clean(error, copy, CheckpointError)
            rows, dense = run.held()
            body = body_of(copy / HEADER)
            assert rows == plain_rows(copy, body), "other rows than those in the files"
            tensors = safetensors_of((copy / body["dense"]["file"]).read_bytes())[1]
            state = body["model"]["state"]
            expected = {name: tensors[state[f"top.{name}"]["~tensor"]].tobytes() for name in dense}
            assert dense == expected, "other parameters than those in the file"
            out = run.rows(BATCHES[0])
            (out["a"].sum() + out["b"].sum()).backward()
        finally:
            run.close()
        return READ


def resealed(header: Path, body: Any) -> None:
    try:
        header.write_bytes(seal(body))
    except (ValueError, TypeError):  # no longer a header at all, but a list, for example
        header.write_text(json.dumps(body))


class Store(Target):
    """A disk store's folder."""

    name = "disk-store"

    def prepare(self, folder: Path) -> None:
        self._from = folder / "own"
        rng = np.random.default_rng(2)
        with DiskStore(self._from, LAYOUT) as store:
            for n in (30, 20, 25):  # some of them twice
                for table, record in LAYOUT.items():
                    keys = np.sort(rng.choice(TABLES[table].rows, n, replace=False)) | (table << 48)
                    store.write(keys, rng.random((n, record.width), np.float32))
                store.flush()

    def draw(self, draw: Draw, folder: Path) -> None:
        copy = folder / "s"
        shutil.copytree(self._from, copy)
        body = body_of(copy / "store.json")
        lines = body["facts"]["segments"]
        if draw.random() < 0.5:
            whole = draw.random() < 0.5
            body = mutated_tree(draw, body) if whole else body | {"facts": mutated_tree(draw, body["facts"])}
        else:
            i = draw.randrange(len(lines))
            lines[i] = resealed_segment(draw, copy, lines[i])
        resealed(copy / "store.json", body)
        (folder / "bounded").write_text(str(draw.randrange(2)))

    def judge(self, folder: Path) -> str:
        copy, bounded = folder / "s", (folder / "bounded").read_text() == "1"
        try:  # None: what the files hold is undefined
            expected = segments(copy, body_of(copy / "store.json")["facts"]["segments"])
        except (KeyError, TypeError, ValueError, AttributeError, OSError):
            expected = None
        try:
            with DiskStore(copy, LAYOUT, rows={0: 60, 1: 40} if bounded else None) as store:
                store.check()
                found = contents(store)
        except DiskError as error:
            return clean(error, copy, DiskError)
        assert found == expected, "other rows than were written"
        return READ


class Import(Target):
    """A state dict in a file."""

    def __init__(self, name: str, *, pickled: bool) -> None:
        self.name, self._pickled = name, pickled

    def prepare(self, folder: Path) -> None:
        from safetensors.torch import save_file

        torch.manual_seed(1)
        run = Run("memory")
        with run.batches as batches:
            for ids in batches:
                run.step(ids)
        skirl.export(run.model, folder / "rows.safetensors")
        run.close()
        state = {"a.weight": torch.rand(60, 4), "x.b.weight": torch.rand(40, 2), "y": torch.zeros(3)}
        save_file(state, folder / "state.safetensors")
        torch.save(state, folder / "state.pt")
        names = ["state.pt"] if self._pickled else ["state.safetensors", "rows.safetensors"]
        self._seeds = [(folder / name).read_bytes() for name in names]

    def draw(self, draw: Draw, folder: Path) -> None:
        data = draw.choice(self._seeds)
        if self._pickled:
            (folder / "file.pt").write_bytes(mutated(draw, data, self._seeds))
        else:
            (folder / "file.safetensors").write_bytes(mutated_safetensors(draw, data, self._seeds))

    def judge(self, folder: Path) -> str:
        path = folder / ("file.pt" if self._pickled else "file.safetensors")
        run = Run("memory")
        try:
            try:
                taken = skirl.import_rows(run.model, path)
            except (ValueError, CheckpointError) as error:
                return clean(error, path, ValueError, CheckpointError)
            if self._pickled:
                read = torch.load(path, weights_only=True, map_location="cpu")  # a bit turns "cpu" into another device
                read = {
                    n: t.float().numpy() for n, t in read.get("state_dict", read).items() if isinstance(t, torch.Tensor)
                }
            else:
                read = safetensors_of(path.read_bytes())[1]
            rows, _ = run.held()
            for number, table in enumerate(TABLES):
                if table.name not in taken:
                    continue
                usual = [form.format(table.name) for form in ("{}.weight", "{}", "x.{}.weight", "rows.{}.weight")]
                name = next(n for n in (*usual, *read) if n in read and n.endswith((usual[0], table.name)))
                ids = read.get(name.removesuffix("weight") + "ids", np.arange(len(read[name])))
                assert len(ids) == taken[table.name]
                expected = {int(i): w for i, w in zip(ids, read[name].astype(np.float32))}
                for i, weight in expected.items():
                    row = np.frombuffer(rows[i | number << 48], np.float32)[: len(weight)]
                    assert np.array_equal(row, weight, equal_nan=True), f"row {i} of {table.name}"
        finally:
            run.close()
        return READ


TARGETS: list[Target] = [
    Checkpoint("checkpoint", "memory"),
    Checkpoint("checkpoint-disk", "disk"),
    Store(),
    Import("import-safetensors", pickled=False),
    Import("import-torch", pickled=True),
]
