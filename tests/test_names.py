"""The public names: each can be imported from where docs and users import it, and is listed in docs/api.md."""

import ast
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import skirl
from tests.processes import interpreter

PACKAGES = (
    "skirl", "skirl.torchrec", "skirl.lightning", "skirl.nn", "skirl.models", "skirl.data", "skirl.store", "skirl.dedup",
    "skirl.train",
)  # fmt: skip


def exported(package: str) -> list[str]:
    """Return the names in `__all__` without importing: some modules need a library that is large or missing."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{package} has no __all__")


NAMES = {package: exported(package) for package in PACKAGES}

STAY = {
    "skirl": "Adagrad Adam Batch CheckpointError Constant Default EmbeddingBag EmbeddingBagCollection EmbeddingCollection "
    "FTRL Grown Hashed InVocabulary KeyedJagged Longest Lookahead Normal Output RowwiseAdagrad SGD Saving ShardSampler "
    "Sweep Table Uniform Variant Wrapped export import_rows lines_of load lookahead moved save size wrap",
    "skirl.torchrec": "SkirlPlanner measure_costs plan",
    "skirl.lightning": "Rows",
    "skirl.nn": "Distinct OncePerBag",
    "skirl.models": "DCAT DCNv2 DIN DLRM DeepCross DeepFM Embeddings MODELS Model WideDeep",
    "skirl.data": "DataFlags Source Synthetic encodings_of",
    "skirl.store": "CheckpointRows DiskError DiskFull DiskStore Layout MemoryStore Record Store open_store",
    "skirl.dedup": "find",
    "skirl.train": "Recipe",
}
"""Names that users import. Add to it what becomes public; what is taken out breaks their code."""


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_a_public_name_can_be_imported(module: str, name: str):
    assert getattr(import_module(module), name) is not None


@pytest.mark.parametrize("module", PACKAGES)
def test_no_name_that_users_import_is_gone(module: str):
    assert sorted(NAMES[module]) == sorted(STAY[module].split())


def test_the_reference_has_every_public_name_and_no_other():
    page = Path(__file__).parents[1] / "docs" / "api.md"
    listed = re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(f"{package}.{name}" for package, names in NAMES.items() for name in names)


def test_members_that_the_reference_lists_exist():
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
    for name, members in re.findall(r"^::: (\S+)\n    options:\n      members: \[(.*)\]", page, re.MULTILINE):
        module, _, last = name.rpartition(".")
        of = getattr(import_module(module), last)
        known = {*dir(of), *(one for kind in of.__mro__ for one in vars(kind).get("__annotations__", ()))}
        assert known >= {*members.split(", ")}, name


def test_public_names_are_listed_and_others_are_refused():
    assert set(skirl.__all__) <= set(dir(skirl))
    assert {package.removeprefix("skirl.") for package in PACKAGES[1:]} <= set(dir(skirl))
    with pytest.raises(AttributeError, match="module 'skirl' has no attribute 'EmbeddingBags'"):
        _ = skirl.EmbeddingBags  # pyright: ignore[reportAttributeAccessIssue]


def test_importing_skirl_imports_no_torch_until_a_name_needs_it():
    code = """if True:
        import sys, skirl
        print("torch" in sys.modules)
        sys.modules["torch"] = None  # imports of it fail
        try:
            skirl.models.DLRM
        except ImportError:
            print("needs it")
    """
    assert interpreter(code).stdout == "False\nneeds it\n"
