"""The package that a user installs: its public names, imports without extras, one version, and none of our machines."""

import ast
import importlib.metadata
import re
import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import skirl
from skirl import cli
from tests.processes import interpreter

ROOT = Path(__file__).parents[1]
EXTRAS = (
    "torchrec", "fbgemm_gpu", "pyarrow", "tensorboard", "zmq", "matplotlib", "lightning", "triton", "pytest", "hypothesis",
    "optuna",
)  # fmt: skip

# Written so that none of these patterns matches itself.
MACHINE_PATH = re.compile(r"(?<![\w.~*-])/(?:home|root|work|Users|opt|mnt)/\w")
REGISTRY_HOST = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|registry\.npmjs|anaconda\.(?:org|com)")


def test_skirl_imports_no_extra_and_its_command_needs_none():
    # torch comes first, because it may try triton
    code = f"""
import sys
import torch
class Missing:
    def find_spec(self, name, *more):
        if name.partition(".")[0] in {EXTRAS!r}:
            print(name)
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
for name in [*sys.modules]:
    if name.partition(".")[0] in {EXTRAS!r}:
        del sys.modules[name]
import skirl
skirl.Table
print(*[name for name in sys.modules if name.startswith("skirl.peers")])
skirl.Sweep
import skirl.cli
del sys.meta_path[0]
import threading, torch.distributed
skirl.EmbeddingBagCollection([skirl.Table("a", 10, 4)], optimizer=skirl.SGD(lr=0.1), cache=5)
print(torch.distributed.is_initialized(), threading.active_count(), "skirl.peers.groups" in sys.modules)
"""
    done = interpreter(code)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert not first, "an extra, or what only several trainers need"
    assert last == "False 1 False", "one trainer starts nothing"


def test_version_is_that_of_the_package_and_the_newest_of_the_changelog(capsys):
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out == f"skirl {skirl.__version__}\n"
    assert importlib.metadata.version("skirl") == skirl.__version__
    assert f"## [{skirl.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_pinned_package_has_one_version():
    pins = [
        line.split("#")[0].strip()
        for name in ("dev.txt", "others.txt")
        for line in (ROOT / "constraints" / name).read_text().splitlines()
    ]
    names = [re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins if pin]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins if pin)
    assert len(names) == len(set(names))


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: no list of tracked files")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_tracked_file_names_a_machine_path_or_a_registry():
    found = []
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            if MACHINE_PATH.search(line) or REGISTRY_HOST.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


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
