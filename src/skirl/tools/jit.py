"""One way to compile a hot loop: `@kernel`.

Every loop over ids or rows is plain Python that Numba compiles, so a reader can step through it: with NUMBA_DISABLE_JIT=1
the same functions run as they are written, about 100x slower. A C++ extension would compile ahead of time and pin the
library to one ABI of torch, which is what users of other libraries complain of first.

The flags are a promise, not a tuning. `nogil`: kernels run beside each other in our own threads. No `fastmath`: LLVM may
then neither fuse a multiply with an add nor reorder a sum, so the bits depend on no vector width. `error_model="numpy"`:
a division by zero gives inf or nan as it does in torch; Python's check for it would keep loops from being vectorised.
Numba cannot be interrupted: a Ctrl-C inside the compiler leaves its registries half filled, and the next kernel fails with
"generator raised StopIteration". So SIGINT waits until the compiler's lock is free, at most some seconds.

The cache on disk notices a change of a kernel's own file only: after a change here, delete the __pycache__ folders.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core import event
from numba.core.cgutils import get_item_pointer
from numba.extending import intrinsic

from skirl.tools.interrupts import Hold, uninterrupted

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile a function of arrays and numbers, at its first call; the result is cached on disk.

    >>> @kernel
    ... def double(x, lo, hi):
    ...     for i in range(lo, hi):
    ...         x[i] = x[i] + x[i]
    >>> x = np.ones(3, np.float32)
    >>> double(x, 1, 3)
    >>> x.tolist()
    [1.0, 2.0, 2.0]
    """
    if config.DISABLE_JIT:  # pyright: ignore[reportAttributeAccessIssue]
        # Compiled code wraps and divides without a word; numpy's scalars would warn at each of them.
        return np.errstate(all="ignore")(function)
    # A doctest has no file to keep a cache beside.
    cached = "<" not in function.__code__.co_filename
    return cast(F, njit(nogil=True, cache=cached, error_model="numpy")(function))


AHEAD = 32
"""Turns ahead that a loop over places all over memory asks for the next ones."""

if TYPE_CHECKING or config.DISABLE_JIT:

    def prefetch(array: np.ndarray, index: int) -> None:
        """Nothing, where nothing is compiled."""

else:

    @intrinsic
    def prefetch(context, array, index):
        """In a kernel: ask for `array[index]` now, to write it soon. The index is not negative.

        A loop over places all over memory that asks 32 turns ahead takes half the time: the processor looks about ten
        turns ahead by itself, and not past a branch that it has guessed wrong.
        """

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
    """Holds Ctrl-C back for as long as the main thread has the compiler's lock, or waits for it."""

    def __init__(self) -> None:
        self._holds: list[Hold] = []

    def on_start(self, event: event.Event) -> None:
        if threading.current_thread() is threading.main_thread():
            self._holds.append(uninterrupted().__enter__())

    def on_end(self, event: event.Event) -> None:
        if self._holds and threading.current_thread() is threading.main_thread():
            self._holds.pop().__exit__(None, None, None)


event.register("numba:compiler_lock", _Quiet())
