"""The loops over rows: on the CPU those compiled for a dim, or the plain ones, with the same bits; and those of a GPU."""

import logging
from functools import cache as remember
from types import ModuleType

import numpy as np
from numba import config

from skirl.core.optim import Rule
from skirl.engine.kernels import cpu
from skirl.tools.jit import Kernel
from skirl.tools.lanes import counts_of

log = logging.getLogger("skirl")

WIDEST = 256
"""Most floats of a row that still fit in registers."""


def pool_for(dim: int, width: int, dtype: np.dtype, one: bool) -> Kernel:
    wide = _wide_for(dim, dtype)
    return cpu.pool if wide is None else wide.pool_kernel(dim, width % 16 != 0, one)


def update_for(dim: int, dtype: np.dtype, rule: Rule | None, whole: bool) -> Kernel:
    """`whole`: all positions are of one part."""
    wide = _wide_for(dim, dtype)
    return cpu.update_kernel(rule) if wide is None else wide.update_kernel(dim, rule, whole)


def _wide_for(dim: int, dtype: np.dtype) -> ModuleType | None:
    compiles = not config.DISABLE_JIT  # pyright: ignore[reportAttributeAccessIssue]
    fits = dtype == np.float32 and dim <= WIDEST + 1 and counts_of(dim, 16)
    return _wide() if compiles and fits else None


@remember
def _wide() -> ModuleType | None:
    """Return the loops compiled by dim, or None if they cannot be built: they use internals of Numba and llvmlite."""
    try:
        from skirl.engine.kernels import wide
        from skirl.tools.lanes import check

        check()
    except Exception as error:
        log.warning(
            "rows take the plain loops, in two to four times the time: vectors cannot be built here (%r)", error
        )
        return None
    return wide
