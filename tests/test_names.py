"""The public names: each can be imported from where docs and users import it."""

import subprocess
import sys
from importlib import import_module

import pytest

import skirl

NAMES = {
    "skirl": skirl.__all__,
    "skirl.torchrec": [
        "SkirlPlanner", "cache_statistics", "hardware_config", "measure_costs", "sharding_plan", "swap", "table_plan",
    ],
    "skirl.lightning": ["Rows"],
    "skirl.nn": ["OncePerBag"],
    "skirl.models": ["DCAT", "DIN", "DLRM", "DCNv2", "DeepCross", "DeepFM", "Embeddings", "Model", "WideDeep"],
    "skirl.data": ["DataFlags", "Source", "Synthetic", "encodings_of"],
    "skirl.store": [
        "DiskError", "DiskFull", "DiskStore", "Layout", "Link", "LinkStore", "MemoryStore", "Record", "Store",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_a_public_name_can_be_imported(module: str, name: str):
    assert getattr(import_module(module), name) is not None


def test_public_names_are_listed_and_others_are_refused():
    assert set(skirl.__all__) <= set(dir(skirl))
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\nneeds it\n"
