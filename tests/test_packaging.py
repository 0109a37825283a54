"""The package that a user installs: it imports without extras, has one version, and names none of our machines."""

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest

import skirl
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


def test_version_is_that_of_the_package_and_the_newest_of_the_changelog():
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
