"""Variants: products of lists, files, and which of them are refused."""

from pathlib import Path

import pytest

from skirl.sweep.variants import seeds_of_one, variants_of, varying
from skirl.train.recipe import Recipe


@pytest.fixture(scope="module")
def base() -> Recipe:
    return Recipe.of(data="synthetic:tiny", model="dlrm-tiny", dim=4, batch=8, steps=4)


def test_a_product_has_every_combination_and_changes_nothing_else(base: Recipe):
    found = variants_of(base, ["lr=0.01,0.5", "top=64x32,8", "seed=0,3"])
    assert len(found) == 8
    assert len({v.name for v in found}) == 8
    for variant in found:
        assert set(variant.overrides) == {"lr", "top", "seed"}
        flat = variant.recipe.flat()
        assert {n: flat[n] for n in variant.overrides} == variant.overrides
        assert {n for n, value in flat.items() if value != base.flat()[n]} <= {*variant.overrides, "data_seed"}
        assert variant.recipe.data.stream_seed == base.data.stream_seed == base.data.seed != 3
    assert found[0].overrides == {"lr": 0.01, "top": (64, 32), "seed": 0}


def test_variants_that_differ_in_the_seed_alone_are_one_configuration():
    base = Recipe.of(data="synthetic:tiny", model="dlrm-tiny", dim=4)
    assert seeds_of_one(variants_of(base, ["seed=0,1", "lr=0.01,0.5"])) == [0, 1, 0, 1]


def test_a_file_has_a_table_for_each_variant(base: Recipe, tmp_path: Path):
    path = tmp_path / "a.toml"
    path.write_text('[low]\nlr = 0.01\n[high]\nlr = 1\ndeep = [8, 4]\nmodel = "dcnv2-tiny"\n')
    assert [(v.name, v.overrides) for v in variants_of(base, (), path)] == [
        ("low", {"lr": 0.01}),
        ("high", {"lr": 1.0, "deep": (8, 4), "model": "dcnv2-tiny"}),
    ]
    twice = variants_of(base, ["seed=0,1"], path)
    assert [v.name for v in twice] == ["low,seed=0", "low,seed=1", "high,seed=0", "high,seed=1"]


SHARED = ("data", "batch", "rows", "schema", "vocab", "steps", "shards", "cache", "store", "depth", "prefetch",
          "peer_timeout", "device", "dtype", "threads", "valid", "workers")  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_what_all_share_is_refused_by_its_name(base: Recipe, name: str):
    assert name not in varying()
    with pytest.raises(ValueError, match=f"^{name} cannot vary: .*run one sweep for each value of {name}$"):
        variants_of(base, [f"{name}=1,2"])


def test_what_is_no_flag_is_refused_in_a_sentence(base: Recipe):
    with pytest.raises(ValueError, match="lrr is not a flag that can vary: those that can are seed, model"):
        variants_of(base, ["lrr=1"])


BAD_FILES = {
    "none.toml": (None, "cannot be read as TOML (no such file"),
    "empty.toml": ("", "has no variant"),
    "flat.toml": ("lr = 1\n", "lr is outside of a table"),
    "broken.toml": ("[a\n", "cannot be read as TOML"),
    "kind.toml": ("[a]\nlr = [1]\n", "variant a: lr is [1], a list: set it to a number"),
    "shared.toml": ("[a]\nbatch = 3\n", "batch cannot vary"),
    "slash.toml": ('["a/b"]\nlr = 1\n', "variant 'a/b' has a name that its folder cannot have"),
    "alike.toml": ("[a]\nlr = 1\n[b]\nlr = 1.0\n", "variants a and b are alike"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_wrong_file_is_refused_in_a_sentence(base: Recipe, tmp_path: Path, name: str):
    text, expected = BAD_FILES[name]
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as said:
        variants_of(base, (), tmp_path / name)
    assert expected in str(said.value)
