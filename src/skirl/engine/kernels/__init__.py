"""The loops over rows: on the CPU those compiled for a dim, or the plain ones, with the same bits; and those of a GPU."""

import numpy as np
from numba import config

from skirl.core.optim import Rule
from skirl.engine.kernels import cpu, wide
from skirl.tools.jit import Kernel
from skirl.tools.lanes import counts_of

WIDEST = 256
"""Most floats of a row that still fit in registers."""


def pool_for(dim: int, width: int, dtype: np.dtype, one: bool) -> Kernel:
    return wide.pool_kernel(dim, width % 16 != 0, one) if _is_wide(dim, dtype) else cpu.pool


def update_for(dim: int, dtype: np.dtype, rule: Rule | None, whole: bool) -> Kernel:
    """`whole`: all positions are of one part."""
    return wide.update_kernel(dim, rule, whole) if _is_wide(dim, dtype) else cpu.update_kernel(rule)


def _is_wide(dim: int, dtype: np.dtype) -> bool:
    compiles = not config.DISABLE_JIT  # pyright: ignore[reportAttributeAccessIssue]
    return compiles and dtype == np.float32 and dim <= WIDEST + 1 and len(counts_of(dim, 16)) > 0
