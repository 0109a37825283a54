"""Targets of initial values: .npy and .safetensors files that a table begins from."""

import warnings
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from skirl import Table
from tests.fuzz.loop import READ, Target, clean
from tests.fuzz.mutate import Draw, mutated, mutated_safetensors
from tests.fuzz.states import safetensors_of

ROWS, DIM = 12, 3


class FirstValues(Target):
    """A matrix in a file. Reading it must give what NumPy reads in full, without a memory map."""

    def __init__(self, suffix: str) -> None:
        self.name, self._suffix = f"first-values-{suffix}", suffix

    def prepare(self, folder: Path) -> None:
        self._seeds = []
        for number, dtype in enumerate((np.float32, np.float64, np.float16, np.int32)):
            values = (np.arange(ROWS * DIM) / 8).astype(dtype).reshape(ROWS, DIM)
            path = folder / f"{number}.{self._suffix}"
            if self._suffix == "npy":
                np.save(path, values if number else np.asfortranarray(values) * 1)
            else:
                save_file({"item.weight": values, "other": values[:2].copy()}, path)
            self._seeds.append(path.read_bytes())

    def draw(self, draw: Draw, folder: Path) -> None:
        data = draw.choice(self._seeds)
        change = mutated if self._suffix == "npy" else mutated_safetensors
        (folder / f"file.{self._suffix}").write_bytes(change(draw, data, self._seeds))

    def judge(self, folder: Path) -> str:
        path = folder / f"file.{self._suffix}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = Table("item", ROWS, DIM, init=path).initial
            except (ValueError, TypeError) as error:
                return clean(error, path, ValueError, TypeError)
            if self._suffix == "npy":
                expected = np.load(path, allow_pickle=False)
            else:
                tensors = safetensors_of(path.read_bytes())[1]
                named = [
                    n for n in tensors if n in ("item", "weight") or n == "item.weight" or n.endswith(".item.weight")
                ]
                expected = tensors[named[0] if named else next(iter(tensors))]
        values = found.take(np.arange(ROWS))  # pyright: ignore[reportAttributeAccessIssue]
        assert np.array_equal(values, expected.astype(values.dtype), equal_nan=True)
        return READ


TARGETS: list[Target] = [FirstValues("npy"), FirstValues("safetensors")]
