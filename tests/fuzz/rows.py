"""Targets of rows: imports of files from elsewhere."""

from contextlib import closing
from pathlib import Path

import numpy as np
import torch

import skirl
from skirl.tools.sealed_json import CheckpointError
from tests.fuzz.mutate import Draw, mutated, mutated_safetensors
from tests.fuzz.states import safetensors_of
from tests.fuzz.target import READ, Target, clean
from tests.streams import used_rows

TABLES = [skirl.Table("a", 60, 4), skirl.Table("b", 40, 2)]

_IDS = (np.random.default_rng(7).random((12, 6, 2)) ** 2 * 40).astype(np.int64)
BATCHES = [skirl.KeyedJagged.one_hot(["a", "b"], torch.from_numpy(ids)) for ids in _IDS]


def embeddings() -> skirl.EmbeddingBagCollection:
    return skirl.EmbeddingBagCollection(TABLES, optimizer=skirl.Adagrad(lr=0.1), cache=24, seed=3)


class Import(Target):
    """A state dict in a file."""

    def __init__(self, name: str, *, pickled: bool) -> None:
        self.name, self._pickled = name, pickled

    def prepare(self, folder: Path) -> None:
        from safetensors.torch import save_file

        torch.manual_seed(1)
        rows = embeddings()
        for ids in BATCHES:
            out = rows(ids)
            (out["a"].sum() + out["b"].square().sum()).backward()
        skirl.export(rows, folder / "rows.safetensors")
        rows.close()
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
        with closing(embeddings()) as model:
            try:
                taken = skirl.import_rows(model, path)
            except (ValueError, CheckpointError) as error:
                return clean(error, path, ValueError, CheckpointError)
            if self._pickled:
                read = torch.load(path, weights_only=True, map_location="cpu")  # a bit turns "cpu" into another device
                read = {
                    n: t.float().numpy() for n, t in read.get("state_dict", read).items() if isinstance(t, torch.Tensor)
                }
            else:
                read = safetensors_of(path.read_bytes())[1]
            rows = used_rows(model.engine)
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
        return READ


TARGETS: list[Target] = [
    Import("import-safetensors", pickled=False),
    Import("import-torch", pickled=True),
]
