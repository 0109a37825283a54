"""Kernels: compiled or not they have the same bits, and none outlives the sources that it was compiled from."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import config, njit
from numba.core import event

import skirl
from skirl.oracle import seen
from skirl.tools import kernel_cache
from skirl.tools.jit import kernel, read_only
from skirl.tools.kernel_cache import KernelCache, cache_for, kernel_folder, sources_of
from tests.processes import interpreter

HOUSE = Path(skirl.__file__).parent
GOLDEN = Path(__file__).parents[1] / "golden"
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
    names = [path.name.split("-")[0] for path in (tmp_path / "skirl/__pycache__/kernels").iterdir()]
    assert names.count("engine.kernels.summing.total") == 2


def test_one_constant_changes_few_kernels():
    """A kernel's sources are the files that it imports, not the whole package: a change elsewhere recompiles nothing."""
    assert HOUSE / "engine/kernels/tree.py" in sources_of(HOUSE / "engine/kernels/cpu.py")
    assert HOUSE / "engine/kernels/tree.py" not in sources_of(HOUSE / "oracle/loops.py")


def test_without_any_folder_kernels_are_compiled_all_the_same(tmp_path, monkeypatch, caplog):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__pycache__").touch()
    (tmp_path / "user").touch()
    monkeypatch.setattr(kernel_cache, "PACKAGE", tmp_path / "package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(config, "CACHE_DIR", "")
    assert kernel_folder.__wrapped__() is None
    assert "set NUMBA_CACHE_DIR" in caplog.text


def test_a_source_that_changed_since_the_process_began_is_not_kept(monkeypatch):
    kernel = getattr(seen._set, "py_func", seen._set)
    assert cache_for(kernel) is not None
    monkeypatch.setitem(kernel_cache._AT_START, HOUSE / "core/keys.py", (0, 0))  # it imports that
    kernel_cache._digest_of.cache_clear()
    try:
        assert cache_for(kernel) is None
    finally:
        kernel_cache._digest_of.cache_clear()


@compiled
def test_each_signature_has_its_file_and_one_that_was_cut_off_or_is_old_is_made_anew(tmp_path, caplog):
    def made():
        @njit
        def plus(x):
            return x + 1

        plus._cache = KernelCache(plus.py_func, tmp_path, "a.b", b"sources")
        return plus

    first = made()
    assert first(1) == 2
    [old] = tmp_path.iterdir()
    assert first(1.0) == 2.0
    [cut] = {*tmp_path.iterdir()} - {old}
    again = made()
    assert (again(1), again(1.0)) == (2, 2.0) and sum(again._cache_hits.values()) == 2
    os.utime(old, (0, 0))
    cut.write_bytes(cut.read_bytes()[:-3])
    again = made()
    assert (again(1), again(1.0)) == (2, 2.0) and sum(again._cache_hits.values()) == 1
    assert "cannot be read" in caplog.text
    assert list(tmp_path.iterdir()) == [cut], "what is old goes when another one is compiled"


def test_uncompiled_kernels_give_the_golden_rows():
    code = "import json; from tests.test_golden_rows import trace; print(json.dumps(trace(plain=False)))"
    done = interpreter(code, env=os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONWARNINGS": "error"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((GOLDEN / "rows.json").read_text())["values"]


@pytest.mark.skipif(config.DISABLE_JIT, reason="nothing is compiled")
def test_what_is_only_read_is_of_one_kind():
    @kernel
    def first(x):
        return x[0]

    frozen = np.arange(3)
    frozen.flags.writeable = False
    for x in (np.arange(3), frozen):
        assert first(read_only(x)) == 0
    assert len(first.signatures) == 1
    kept = np.arange(3)
    with pytest.raises(ValueError, match="read-only"):
        read_only(kept)[0] = 1
    kept[0] = 1  # the array itself is unchanged


def test_a_ctrl_c_waits_for_the_compiler():
    """Raised inside the compiler, it would leave Numba's registries half filled, and later kernels would not compile."""
    inside, counts = [], []

    class Press(event.Listener):
        def on_start(self, event):
            inside.append(None)
            signal.raise_signal(signal.SIGINT)
            counts.append(len(inside))

        def on_end(self, event):
            pass

    @kernel
    def plus(x, lo, hi):
        for i in range(lo, hi):
            x[i] += 1

    press = Press()
    event.register("numba:compiler_lock", press)
    try:
        x = np.zeros(3)
        with pytest.raises(KeyboardInterrupt):
            plus(x, 0, 3)
    finally:
        event.unregister("numba:compiler_lock", press)
    assert inside and len(counts) == len(inside)  # the handler did not raise where the signal arrived
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    plus(x, 0, 3)
    assert x.tolist() == [1, 1, 1]
