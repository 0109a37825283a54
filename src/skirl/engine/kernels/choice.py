"""Which loops a kind of row takes: those compiled for its dim, or the plain ones. The bits are the same."""

import logging
from functools import cache as remember
from types import ModuleType

import numpy as np
from numba import config

from skirl.engine.kernels import cpu, tree
from skirl.tools.jit import Kernel

log = logging.getLogger("skirl")

WIDEST = 256
"""Floats of a row that still fits in registers."""
CACHE_LINE = 64
STREAMED = 32 << 20
"""Bytes of an output from which it is written past the caches: its reader would not find it there anyway."""


def pool_for(dim: int, width: int, out: np.ndarray, one: bool) -> Kernel:
    """The kernel that pools rows into an output, with the arguments of `cpu.pool`.

    **Arguments**

    - `dim`: numbers in a row.
    - `width`: numbers in a record, which holds the row and its optimizer's state.
    - `out`: the output. A large one that begins on a cache line is written past the caches.
    - `one`: whether each bag has exactly one id, so that there are no offsets.
    """
    wide = _wide() if _fits(dim, out.dtype) else None
    if wide is None:
        return cpu.pool
    across = width % 16 != 0
    make = wide.gather_kernel if one else wide.pool_kernel
    return make(dim, across, out.nbytes >= STREAMED and out.ctypes.data % CACHE_LINE == 0 and dim % 16 == 0)


def update_for(dim: int, dtype: np.dtype, kind: int) -> Kernel:
    """The kernel that sums gradients and updates rows, with the arguments of `cpu.update`.

    **Arguments**

    - `dim`: numbers in a row.
    - `dtype`: their type.
    - `kind`: the row optimizer's, one of `KIND_...` in core/optim.py.
    """
    wide = _wide() if _fits(dim, dtype) else None
    return cpu.update if wide is None else wide.update_kernel(dim, kind)


def update_apart_for(dim: int, dtype: np.dtype, kind: int) -> Kernel:
    """The same with gradients in two arrays: bags beyond those of `grads` are in the one behind it. For wide rows only.

    **Arguments**

    - `dim`, `dtype`, `kind`: as in `update_for`.
    """
    wide = _wide()
    assert wide is not None and _fits(dim, dtype)
    return wide.update_apart_kernel(dim, kind)


def is_wide(dim: int, dtype: np.dtype) -> bool:
    """Whether rows take the loops compiled for their dim.

    **Arguments**

    - `dim`: numbers in a row.
    - `dtype`: their type.
    """
    return _fits(dim, dtype) and _wide() is not None


def sums_for(dim: int, dtype: np.dtype) -> Kernel:
    """The kernel that sums gradients over micro-batches, with the arguments of `tree.sums`.

    **Arguments**

    - `dim`: numbers in a row.
    - `dtype`: their type.
    """
    if not _fits(dim, dtype) or _wide() is None:
        return tree.sums
    from skirl.engine.kernels import wide_tree

    return wide_tree.sums_kernel(dim)


def _fits(dim: int, dtype: np.dtype) -> bool:
    compiles = not config.DISABLE_JIT  # pyright: ignore[reportAttributeAccessIssue]
    return compiles and dtype == np.float32 and 16 <= dim <= WIDEST + 1 and dim % 16 <= 1


@remember
def _wide() -> ModuleType | None:
    """The loops compiled by dim; None where they cannot be built: they use internals of Numba and llvmlite."""
    try:
        from skirl.engine.kernels import wide
        from skirl.tools.lanes import check

        check()
    except Exception as error:
        log.warning(
            "rows take the plain loops, two to four times as slow with the same bits: vectors of a row cannot be built with "
            "this Numba and llvmlite (%s: %s)",
            type(error).__name__,
            str(error).strip().partition("\n")[0],
        )
        return None
    return wide
