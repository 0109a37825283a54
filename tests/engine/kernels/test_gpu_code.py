"""The code that the Triton kernels compile to, read without a GPU: the part of equal bits that no interpreter shows."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import skirl

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="Triton has no ptxas there"
)

ROOT = Path(__file__).parents[3]


def compiled(tmp_path, capability, *wanted):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(Path(skirl.__file__).parents[1]), str(ROOT), env.get("PYTHONPATH", "")]),
    }
    words = [str(capability), *(",".join(map(str, each)) for each in wanted)]
    command = [sys.executable, "-m", "tests.engine.kernels.compiled", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(kernels):
    names = {"_pool", "_stretches", "_update", "_copy", "_fill"}
    assert {kernel["kernel"] for kernel in kernels} == names
    for kernel in kernels:
        name, operations = kernel["kernel"], kernel["operations"]
        about = f"{name} of {kernel['cache']} {kernel['options']}"
        assert not kernel["fused"], about
        # The rare path of a division is a call, for which ptxas may reserve a register or two.
        assert kernel["spilled"] <= 16, f"{about}: {kernel['spilled']} bytes spilled"
        assert kernel["registers"] <= 168, f"{about}: {kernel['registers']} registers"
        for operation in operations:
            what, _, form = operation.partition(".")
            floating = form.endswith(("f32", "f64"))
            assert not (floating and what in ("fma", "mad")), f"{about}: {operation}"
            assert not {"approx", "full", "ftz", "local"} & set(form.split(".")), f"{about}: {operation}"
            if floating and what in ("add", "sub", "mul", "div", "sqrt"):
                # The rounding has to be explicit, or ptxas may fuse the add.
                assert form.startswith("rn."), f"{about}: {operation}"
        if name == "_update" and (kernel["rule"] != "sgd" or kernel["options"]["CLIPS"] == "True"):
            real = "f64" if "float64" in kernel["cache"] else "f32"
            assert operations[f"div.rn.{real}"] and operations[f"sqrt.rn.{real}"], about


def loads(kernels, name, **options):
    (kernel,) = [
        k for k in kernels if k["kernel"] == name and all(k["options"][o] == str(value) for o, value in options.items())
    ]
    return {operation for operation in kernel["operations"] if operation.startswith(("ld.global.v", "st.global.v"))}


def check_width(kernels, dim):
    """Check for loads of 16 bytes if rows begin at multiples of 16: not for row-wise Adagrad, whose records have dim +
    1 numbers."""
    assert loads(kernels, "_pool", ONE=False, dim=dim) == {"ld.global.v4.b32", "st.global.v4.b32"}
    assert loads(kernels, "_pool", ONE=True, dim=dim) == {"st.global.v4.b32"}
    assert loads(kernels, "_copy", width=3 * dim) == {"ld.global.v4.b32", "st.global.v4.b32"}
    adam = [k for k in kernels if k["rule"] == "adam"]
    assert loads(adam, "_update", dim=dim) == {"ld.global.v4.b32", "st.global.v4.b32"}
    assert loads(kernels, "_fill", dim=dim) == {"st.global.v4.b32"}


@pytest.mark.slow
def test_nothing_is_fused_or_rough(tmp_path):
    """Of three optimizers; a campaign compiles all."""
    kernels = compiled(tmp_path, 90, (64, "float32", "sgd", "rowwise-adagrad", "adam"))
    check(kernels)
    check_width(kernels, 64)


@pytest.mark.slow
def test_rows_of_a_hundred_floats_take_16_bytes_a_load_too(tmp_path):
    check_width(compiled(tmp_path, 90, (100, "float32")), 100)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_every_dim_and_type(tmp_path, capability, dtype):
    check(compiled(tmp_path, capability, *((dim, dtype) for dim in (1, 3, 16, 64, 100, 256, 1000, 1025))))
