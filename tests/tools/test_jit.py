"""The kernels are plain Python: uncompiled, they have the same bits and give no warning."""

import os
import signal

import numpy as np
import pytest
from numba import config
from numba.core import event

from skirl.tools.jit import kernel, read_only
from tests.processes import interpreter

SCRIPT = """
import numpy as np
from skirl.core.initial import Normal, Uniform
from skirl.engine.kernels import cpu
from skirl.engine.kernels.tree import Gradients
from skirl.core.optim import FTRL, Adagrad, Adam, RowwiseAdagrad, SGD
from skirl.tools.hash_index import HashIndex
from skirl.core.initial import first_rows

def everything():
    index, keys = HashIndex(), np.arange(300) * 0x1234567890ABC % (1 << 62)
    index.put(keys, np.arange(300, dtype=np.int32))
    index.drop(keys[::3])
    yield from (index.keys, index.values[index.keys >= 0])
    yield first_rows([3, 1 << 48 | 5], Uniform(0.1), 5, seed=9)
    yield first_rows([3, 1 << 48 | 5], Normal(0.1), 5, seed=9)
    grads = first_rows(range(4), Uniform(1.0), 5, seed=1)
    ids, none = np.array([0, 1, 1, 2], np.int32), np.empty(0, np.float32)
    for optimizer in (SGD(), Adagrad(), RowwiseAdagrad(weight_decay=0.1, clip=0.1), Adam(), Adagrad(eps=0.0),
                      SGD(momentum=0.5), FTRL(l1=0.1)):
        cache = np.zeros((3, optimizer.width(5)), np.float32)
        cache[:, :5] = first_rows(range(3), Uniform(1.0), 5, seed=2)
        grads[3, 4] = 0.0  # eps 0: a division of 0 by 0
        cpu.update_kernel(optimizer.rule)(
                   cache, 5, np.arange(3, dtype=np.int32), np.arange(3),
                   Gradients(np.array([0, 1, 3, 4], np.int32), np.arange(4, dtype=np.int32),
                             np.arange(4, dtype=np.int32), none, grads, np.array([True])),
                   optimizer.scalars(0.1, np.array([1])), 0, 3)
        out = np.empty((2, 5), np.float32)
        cpu.pool(cache, 5, ids, np.array([0, 3, 4], np.int32), 1, none, out, 0, 2)
        yield from (cache, out)

print(b"".join(np.nan_to_num(x, nan=7.0).tobytes() for x in everything()).hex())
"""


def run_script(**environment: str) -> str:
    strict = "import warnings; warnings.simplefilter('error')"
    done = interpreter(strict + SCRIPT, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_uncompiled_kernels_give_the_same_bits():
    assert run_script(NUMBA_DISABLE_JIT="1") == run_script(NUMBA_DISABLE_JIT="0")


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
