"""Rows from elsewhere: under any name, from any file, and refused if they do not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import skirl
from tests.cases import cases


def made() -> skirl.EmbeddingBagCollection:
    tables = [skirl.Table("a", 6, 2), skirl.Table("b", 6, 4)]
    return skirl.EmbeddingBagCollection(tables, optimizer=skirl.Adagrad(), cache=4)


def rows_of(embeddings: skirl.EmbeddingBagCollection) -> dict[str, torch.Tensor]:
    ids = skirl.KeyedJagged.one_hot(["a", "b"], torch.arange(6)[:, None].expand(6, 2))
    out = embeddings.eval()(ids)
    return {name: out[name].detach().clone() for name in ("a", "b")}


@given(
    which=st.sets(st.sampled_from(["a", "b"]), min_size=1),
    form=st.sampled_from(["{}", "{}.weight", "model.bags.{}.weight", "other_{}"]),
    kind=st.sampled_from(["dict", ".pt", ".safetensors"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99),
)
@cases(40)
def test_rows_are_those_of_the_source_and_others_stay(
    tmp_path_factory: pytest.TempPathFactory, which: set[str], form: str, kind: str, dtype: torch.dtype, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    dims = {"a": 2, "b": 4}
    source: Any = {form.format(n): torch.randn(6, dims[n], generator=draw).to(dtype) for n in sorted(which)}
    expected = rows_of(ours := made()) | {n: source[form.format(n)].to(torch.float32) for n in which}
    source["bias"] = torch.zeros(3)
    if kind != "dict":
        path = tmp_path_factory.getbasetemp() / f"rows{kind}"
        (torch.save if kind == ".pt" else save_file)(source, path)
        source = path
    names = {n: form.format(n) for n in which} if form.startswith("other") else None
    assert skirl.import_rows(ours, source, names=names) == dict.fromkeys(sorted(which), 6)
    found = rows_of(ours)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a.weight": torch.zeros(6, 2, dtype=torch.int64)}, "a.weight is of torch.int64"),
        ({"a.weight": torch.tensor(1.0)}, r"a.weight is \[\]"),
        (
            {"a.weight": torch.zeros(2, 2), "a.ids": torch.zeros(2)},
            "a.ids is of torch.float32 .* not of torch.int64: convert it",
        ),
        ({"a.weight": torch.tensor(1.0), "a.ids": torch.zeros(2, dtype=torch.int64)}, "a.ids is"),
        ({"a.weight": torch.zeros(2, 2), "a.ids": torch.arange(2), "a.sum": torch.zeros(2, 0, 2)}, "a.sum is"),
        ({"x": torch.zeros(2)}, "has no table of this model"),
        ({"x.a.weight": torch.zeros(6, 2), "y.a.weight": torch.zeros(6, 2)}, "say which by names="),
    ],
)
def test_tensors_of_another_form_are_refused_with_their_file(
    tmp_path: Path, tensors: dict[str, torch.Tensor], words: str
) -> None:
    save_file(tensors, tmp_path / "t.safetensors")
    torch.save(tensors, tmp_path / "t.pt")
    for name in ("t.safetensors", "t.pt"):
        rows = made()
        with pytest.raises(ValueError, match=words) as caught:
            skirl.import_rows(rows, tmp_path / name)
        assert name in str(caught.value) and not len(rows.engine.store)


def test_a_flipped_bit_in_a_file_of_torch_is_found(tmp_path: Path) -> None:
    """Torch checks no checksum when it maps the file."""
    state = {"a.weight": torch.ones(6, 2), "b.weight": torch.full((6, 4), 2.0)}
    path = tmp_path / "t.pt"
    torch.save(state, path)
    data = bytearray(path.read_bytes())
    data[bytes(data).index(np.float32(2.0).tobytes() * 4)] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"t\.pt is not a state dict .*CRC"):
        skirl.import_rows(made(), path)
    try:
        torch.serialization.set_crc32_options(False)
        torch.save(state, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert skirl.import_rows(made(), path) == {"a": 6, "b": 6}


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    torch.save({"a.weight": nn.Module}, tmp_path / "in.pt")
    with pytest.raises(ValueError, match=r"not a state dict that torch\.load") as refused:
        skirl.import_rows(made(), tmp_path / "in.pt")
    assert len(str(refused.value)) < 500 and "\n" not in str(refused.value)  # torch's own message takes a page
    (tmp_path / "in.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="not a safetensors file"):
        skirl.import_rows(made(), tmp_path / "in.safetensors")
