"""Compiled kernels never outlive the sources they were compiled from, and one process compiles them for all."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from numba import config

import skirl
from skirl.engine.kernels import tree
from skirl.oracle import seen
from skirl.tools import kernel_cache
from skirl.tools.kernel_cache import KernelCache, cache_for, kernel_folder, sources_of

HOUSE = Path(skirl.__file__).parent
compiled = pytest.mark.skipif(config.DISABLE_JIT, reason="nothing is compiled")

SUMMING = """
import numpy as np
from skirl.engine.kernels.tree import STRETCH
from skirl.tools.jit import kernel

@kernel
def total(x):
    whole = np.float32(0)
    for first in range(0, len(x), STRETCH):
        part = np.float32(0)
        for i in range(first, min(first + STRETCH, len(x))):
            part = part + x[i]
        whole = whole + part
    return whole
"""
RUN = """
import numpy as np
from skirl.engine.kernels.summing import total
print(np.float32(total(np.full(600, 0.1, np.float32))).tobytes().hex(), len(getattr(total, "_cache_hits", ())))
"""


def test_a_changed_constant_of_another_file_gives_new_bits(tmp_path):
    """Like cpu.py, whose sums take their stretches from tree.py, but without torch, and so in a second."""
    shutil.copytree(HOUSE, tmp_path / "skirl", ignore=shutil.ignore_patterns("__pycache__"))
    kernels = tmp_path / "skirl/engine/kernels"
    (kernels / "summing.py").write_text(SUMMING)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment["PYTHONPATH"] = str(tmp_path)

    def bits(**more):
        run = [sys.executable, "-c", RUN]
        done = subprocess.run(run, env=environment | more, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found, hits = done.stdout.split()
        return found, int(hits)

    first, _ = bits()
    assert bits() == (first, 1)  # the second process compiles nothing
    constant = kernels / "tree.py"
    constant.write_text(constant.read_text().replace("STRETCH = 256", "STRETCH = 3"))
    second, hits = bits()
    assert second != first and hits == 0
    assert second == bits(NUMBA_DISABLE_JIT="1")[0]
    folders = [path.name.split("-")[0] for path in (tmp_path / "skirl/__pycache__/kernels").iterdir()]
    assert folders.count("engine.kernels.summing") == 2


def test_one_constant_changes_few_kernels():
    """A kernel's sources are the files that it imports, not the whole package: a change elsewhere recompiles nothing."""
    assert HOUSE / "engine/kernels/tree.py" in sources_of(HOUSE / "engine/kernels/cpu.py")
    assert HOUSE / "engine/kernels/tree.py" not in sources_of(HOUSE / "oracle/loops.py")


def test_folders_long_unused_are_removed(tmp_path):
    day = 86400
    ages = {"a.b-1": 0, "a.b-2": 9, "a.b-3": 2, "a.b-4": 0.5, "a.b-5": 8, "a.b-6": 7, "a-7": 99}
    for name, age in ages.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.nbc").touch()
        then = tmp_path.stat().st_mtime - age * day
        os.utime(tmp_path / name, (then, then))
    kernel_cache._clear(tmp_path, "a.b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-7", "a.b-1", "a.b-3", "a.b-4", "a.b-6"]


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The places where kernels may be stored: a folder in the package, and the user's."""
    (tmp_path / "package").mkdir()
    monkeypatch.setattr(kernel_cache, "PACKAGE", tmp_path / "package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(config, "CACHE_DIR", "")
    return tmp_path


def test_without_any_folder_kernels_are_compiled_all_the_same(places, caplog):
    (places / "package/__pycache__").touch()
    (places / "user").touch()
    assert kernel_folder.__wrapped__() is None
    assert "set NUMBA_CACHE_DIR" in caplog.text


def source_of(kernel):
    return getattr(kernel, "py_func", kernel)


def test_a_source_that_changed_since_the_process_began_is_not_kept(monkeypatch):
    kernel = source_of(seen._set)
    assert cache_for(kernel) is not None
    monkeypatch.setitem(kernel_cache._AT_START, HOUSE / "core/keys.py", (0, 0))  # it imports that
    kernel_cache._folder_of.cache_clear()
    try:
        assert cache_for(kernel) is None
    finally:
        kernel_cache._folder_of.cache_clear()


def files_of(folder):
    cache = KernelCache(source_of(tree.stretches_of), folder)
    cache._impl.ensure_cache_path()
    return cache._cache_file


def test_two_processes_that_keep_two_signatures_do_not_mix_them(tmp_path):
    one, other = files_of(tmp_path), files_of(tmp_path)
    assert one.load("float32") is None and other.load("float64") is None  # both start before either has finished
    one.save("float32", b"single")
    other.save("float64", b"double")
    assert files_of(tmp_path).load("float32") == b"single"
    assert files_of(tmp_path).load("float64") == b"double"


def test_a_file_that_was_cut_off_is_written_anew(tmp_path, caplog):
    files = files_of(tmp_path)
    files.save("key", b"code")
    (path,) = tmp_path.glob("*.nbc")
    path.write_bytes(path.read_bytes()[:-3])
    assert files.load("key") is None
    assert str(tmp_path) in caplog.text
    files.save("key", b"code")
    files.end_turn()
    assert files.load("key") == b"code"
    path.write_bytes(pickle.dumps(("another key", b"other code")))
    assert files.load("key") is None


RACE = """
import json, os, sys, time
from numba.core import event
import numpy as np
from skirl.tools.hash_index import mix

class Slow(event.Listener):  # so long that the others come meanwhile
    begun = 0
    def on_start(self, event):
        self.begun += 1
        time.sleep(0.5)
    def on_end(self, event):
        pass

slow = Slow()
event.register("numba:compile", slow)
folder, number = sys.argv[1:]
open(f"{folder}/ready-{number}", "w").close()
while not os.path.exists(f"{folder}/go"):
    time.sleep(0.005)
print(json.dumps([int(mix(np.int64(7))), slow.begun]))
"""


@compiled
def test_one_of_several_processes_compiles(tmp_path):
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    team = [
        subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path), str(n)], stdout=subprocess.PIPE, env=env)
        for n in range(3)
    ]
    while len(list(tmp_path.glob("ready-*"))) < 3:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    said = [json.loads(process.communicate()[0]) for process in team]
    assert len({value for value, _ in said}) == 1
    assert sum(begun for _, begun in said) == 1
    assert not list(tmp_path.rglob("*.turn"))
