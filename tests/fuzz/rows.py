"""Targets of rows: checkpoints in memory and on disk, a disk store, imports.

A checksum must find any damaged byte, so that the newest whole checkpoint is used, or none. Which one that is, is known
when the case is drawn, and written next to it. There are parsers behind the checksums too: some cases change a header,
a tensor or a record and seal it again, and the result of loading must be what `plain_rows` reads from the files.
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
from skirl.engine.access import peek
from skirl.store.base import Record
from skirl.store.disk import records
from skirl.store.disk.store import DiskError, DiskStore
from skirl.tools.sealed_json import CheckpointError, seal
from tests.fuzz.mutate import Draw, mutated, mutated_safetensors, mutated_tree
from tests.fuzz.states import safetensors_of
from tests.fuzz.target import READ, Target, clean
from tests.store.conformance import contents

TABLES = [skirl.Table("a", 60, 4), skirl.Table("b", 40, 2)]
LAYOUT = {0: Record(8), 1: Record(4)}

Rows = dict[int, bytes]
"""Records by key."""


class Loader:
    """A loader with the same batches each time."""

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        self._ids = [torch.from_numpy((rng.random((6, 2)) ** 2 * 40).astype(np.int64)) for _ in range(12)]
        self._next = 0

    def __iter__(self) -> Any:
        while self._next < len(self._ids):
            self._next += 1
            yield skirl.KeyedJagged.one_hot(["a", "b"], self._ids[self._next - 1])
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if type(state.get("next")) is not int or not 0 <= state["next"] <= len(self._ids):
            raise ValueError("the loader's state is none")
        self._next = state["next"]


class Run:
    """A model, its optimizer and its batches."""

    def __init__(self, store: str) -> None:
        torch.manual_seed(0)
        rows = skirl.EmbeddingBagCollection(TABLES, optimizer=skirl.Adagrad(lr=0.1), cache=24, store=store, seed=3)
        self.model = torch.nn.ModuleDict({"rows": rows, "top": torch.nn.Linear(6, 1)})
        self.rows = rows
        self.dense = torch.optim.Adam(self.model["top"].parameters(), lr=0.01)
        self.batches = skirl.lookahead(Loader(), self.model, sparse=lambda ids: ids, patience=120)

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
        found: Rows = {}
        for bank, members in enumerate(self.rows.engine.schema.banks):
            for table in members.tables:
                keys = np.arange(TABLES[table].rows) | (table << 48)
                keys = keys[self.rows.engine.seen.has(keys)]
                values = peek(self.rows.engine, keys, bank)[0]
                found |= {int(key): row.tobytes() for key, row in zip(keys, values)}
        return found, {name: value.numpy().tobytes() for name, value in self.model["top"].state_dict().items()}


def train(folder: Path, store: str) -> list[tuple[Rows, dict[str, bytes]]]:
    """Save three checkpoints, and return what each holds."""
    run, states = Run(store), []
    with run.batches as batches:
        for ids in batches:
            run.step(ids)
            if batches.step in (4, 5, 9):
                skirl.save(folder, **run.whole(), keep=3)
                rows, dense = run.held()  # without rows that were only planned ahead, which are not in the checkpoint
                saved = plain_rows(folder, body_of(folders.header(folder, len(states) + 1)))
                assert saved and all(rows[key] == row for key, row in saved.items())
                states.append((saved, dense))
    run.rows.close()
    return states


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


def damage(draw: Draw, folder: Path) -> str:
    """Damage one file, and return its name."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "lock")
    headers = [p for p in paths if p.suffix == ".json"]
    path = draw.choice(headers if headers and draw.random() < 0.3 else paths)
    data, others = path.read_bytes(), [draw.choice(paths).read_bytes()]
    path.unlink()
    if draw.random() > 0.05:
        path.write_bytes(mutated(draw, data, others))
    return str(path.relative_to(folder))


def body_of(path: Path) -> Any:
    body = json.loads(path.read_bytes())
    body.pop("~sha256", None)
    return body


class Checkpoint(Target):
    """A folder of three checkpoints, each with only what changed since the one before."""

    def __init__(self, name: str, store: str, *, sealed: bool = False) -> None:
        self.name, self._store, self._sealed = name, store, sealed

    def prepare(self, folder: Path) -> None:
        self._from = folder / "c"
        self._states = train(self._from, "memory" if self._store == "memory" else f"disk:{folder / 'rows'}")

    def draw(self, draw: Draw, folder: Path) -> None:
        copy = folder / "c"
        shutil.copytree(self._from, copy)
        if not self._sealed:
            names = {str(p.relative_to(copy)): p.read_bytes() for p in copy.rglob("*") if p.is_file()}
            for _ in range(draw.choice([1, 1, 2])):
                damage(draw, copy)
            whole = 0
            for path in sorted(copy.glob("checkpoint-*.json")):
                if path.read_bytes() == names[path.name]:
                    needed = {f for n in folders.files(body_of(path)) for f in names if f.startswith(n)}
                    if all((copy / f).is_file() and (copy / f).read_bytes() == names[f] for f in needed):
                        whole = int(path.stem[11:])
            (folder / "whole").write_text(str(whole))
            return
        for number in (1, 2):
            (copy / f"checkpoint-{number:06}.json").unlink()
        header = copy / "checkpoint-000003.json"
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
        try:
            header.write_bytes(seal(body))
        except (ValueError, TypeError):  # no longer a header at all, but a list, for example
            header.write_text(json.dumps(body))
        (folder / "whole").write_text("sealed")

    def judge(self, folder: Path) -> str:
        whole, copy = (folder / "whole").read_text(), folder / "c"
        run = Run("memory" if self._store == "memory" else f"disk:{folder / 'own'}")
        try:
            try:
                skirl.load(copy, **run.whole())
            except ValueError as error:
                assert whole in ("0", "sealed"), f"checkpoint {whole} is whole, and was not used: {error}"
                return clean(error, copy, CheckpointError)
            rows, dense = run.held()
            if whole == "sealed":
                body = body_of(copy / "checkpoint-000003.json")
                assert rows == plain_rows(copy, body), "other rows than those in the files"
                tensors = safetensors_of((copy / body["dense"]["file"]).read_bytes())[1]
                state = body["model"]["state"]
                expected = {name: tensors[state[f"top.{name}"]["~tensor"]].tobytes() for name in dense}
                assert dense == expected, "other parameters than those in the file"
            else:
                assert whole != "0", "what is damaged was loaded"
                assert (rows, dense) == self._states[int(whole) - 1], f"not what checkpoint {whole} holds"
            out = run.rows(next(iter(Loader())))
            (out["a"].sum() + out["b"].sum()).backward()
        finally:
            run.close()
        return READ


def fill(store: Any) -> Rows:
    """Put rows into a store, some of them twice, and return its contents."""
    rng, found = np.random.default_rng(2), dict[int, bytes]()
    for n in (30, 20, 25):
        for table, record in LAYOUT.items():
            keys = np.sort(rng.choice(TABLES[table].rows, n, replace=False)) | (table << 48)
            rows = rng.random((n, record.width), np.float32)
            store.write(keys, rows)
            found |= {int(key): row.tobytes() for key, row in zip(keys, rows)}
        store.flush()
    return found


class Store(Target):
    """A disk store's folder."""

    name = "disk-store"

    def prepare(self, folder: Path) -> None:
        self._from = folder / "own"
        store = DiskStore(self._from, LAYOUT)
        self._rows = fill(store)
        store.close()

    def draw(self, draw: Draw, folder: Path) -> None:
        copy = folder / "s"
        shutil.copytree(self._from, copy)
        header = copy / "store.json"
        sealed = draw.random() < 0.5
        if not sealed:
            damage(draw, copy)
            if draw.random() < 0.1:
                (copy / draw.choice(["x", "0123456789abcdef.rows", "0123456789abcdef.rows.tmp"])).write_bytes(b"1")
        else:
            body = body_of(header)
            lines = body["facts"]["segments"]
            if draw.random() < 0.5:
                whole = draw.random() < 0.5
                body = mutated_tree(draw, body) if whole else body | {"facts": mutated_tree(draw, body["facts"])}
            else:
                i = draw.randrange(len(lines))
                lines[i] = resealed_segment(draw, copy, lines[i])
            header.write_bytes(seal(body) if isinstance(body, dict) else json.dumps(body).encode())
        (folder / "sealed").write_text(str(int(sealed)))
        (folder / "bounded").write_text(str(draw.randrange(2)))

    def judge(self, folder: Path) -> str:
        copy, sealed = folder / "s", (folder / "sealed").read_text() == "1"
        bounded = {0: 60, 1: 40} if (folder / "bounded").read_text() == "1" else None
        expected = self._expected(copy) if sealed else self._rows
        try:
            with DiskStore(copy, LAYOUT, rows=bounded) as store:
                store.check()
                found = contents(store)
        except DiskError as error:
            return clean(error, copy, DiskError)
        assert found == expected, "other rows than were written"
        return READ

    def _expected(self, copy: Path) -> Rows | None:
        """Return the rows that the files hold now; None if that is undefined."""
        try:
            return segments(copy, body_of(copy / "store.json")["facts"]["segments"])
        except (KeyError, TypeError, ValueError, AttributeError, OSError):
            return None


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
    Checkpoint("checkpoint-sealed", "memory", sealed=True),
    Checkpoint("checkpoint-disk", "disk"),
    Checkpoint("checkpoint-disk-sealed", "disk", sealed=True),
    Store(),
    Import("import-safetensors", pickled=False),
    Import("import-torch", pickled=True),
]
