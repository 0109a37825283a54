"""The one way to compile a hot loop, `@kernel`, and what a loop may ask of the processor."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core import event
from numba.core.cgutils import get_item_pointer
from numba.extending import intrinsic

from skirl.tools.interrupts import Hold
from skirl.tools.kernel_cache import cache_for

Kernel = Callable[..., Any]
F = TypeVar("F", bound=Kernel)


def kernel(function: F) -> F:
    """Compile a function of arrays and numbers at its first call, and keep the result on disk: see `kernel_folder`.

    With NUMBA_DISABLE_JIT=1 it stays plain Python, about 100 times slower, with the same bits.
    There is no `fastmath`: LLVM neither fuses a multiply with an add nor reorders a sum.
    """
    if config.DISABLE_JIT:  # pyright: ignore[reportAttributeAccessIssue]
        # Compiled code wraps and divides silently; numpy's scalars would warn each time.
        return np.errstate(all="ignore")(function)
    # Nobody calls it from C, so the wrapper for that is left out.
    options: Any = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
    compiled: Any = njit(**options)(function)
    cache = cache_for(function)
    if cache is not None:
        compiled._cache = cache
    return cast(F, compiled)


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a read-only view. Kernels are compiled for each kind of array; for what they only read, this is one."""
    view = array.view()
    view.flags.writeable = False
    return view


AHEAD = 32
"""Number of turns ahead that a loop with scattered accesses prefetches memory."""

if TYPE_CHECKING or config.DISABLE_JIT:

    def prefetch(array: np.ndarray, index: int) -> None:
        """Do nothing, since nothing is compiled."""

else:

    @intrinsic
    def prefetch(context, array, index):
        """Fetch `array[index]` into the cache to write to it soon (in kernels only). The index must not be negative."""

        def generate(context, builder, signature, args):
            view = context.make_array(signature.args[0])(context, builder, args[0])
            place = get_item_pointer(context, builder, signature.args[0], view, [args[1]], wraparound=False)
            byte = builder.bitcast(place, ir.IntType(8).as_pointer())
            number = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte.type, number, number, number])
            call = builder.module.declare_intrinsic("llvm.prefetch", [byte.type], kind)
            builder.call(call, [byte, number(1), number(3), number(1)])  # to write, into the nearest cache, data
            return context.get_dummy_value()

        return types.void(array, index), generate


class _Quiet(event.Listener):
    """Holds Ctrl-C back while the main thread has the compiler's lock or waits for it, some seconds at most.

    Raised inside the compiler, it would leave Numba's registries half filled, and the next kernel would not compile.
    """

    def __init__(self) -> None:
        self._holds: list[Hold] = []

    def on_start(self, event: event.Event) -> None:
        if threading.current_thread() is threading.main_thread():
            self._holds.append(Hold().__enter__())

    def on_end(self, event: event.Event) -> None:
        if self._holds and threading.current_thread() is threading.main_thread():
            self._holds.pop().__exit__(None, None, None)


event.register("numba:compiler_lock", _Quiet())
