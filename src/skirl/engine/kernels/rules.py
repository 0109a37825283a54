"""The rules of row optimizers, compiled for the CPU: on numbers, or on the vectors of a row."""

from functools import cache as remember
from typing import Any

import numpy as np
from numba import config, njit, types
from numba.extending import overload

from skirl.core import optim
from skirl.core.optim import Rule
from skirl.tools import lanes
from skirl.tools.jit import Kernel, kernel


@kernel
def numbers_of(scalars, table):
    """Return a rule's numbers, `n`, for a table."""
    return (
        scalars[table, 2], scalars[table, 3], scalars[table, 4], scalars[table, 5], scalars[table, 6], scalars[table, 7]
    )  # fmt: skip


@remember
def compiled(rule: Rule) -> Kernel:
    """Return a rule for kernels. It is compiled as a part of each kernel that calls it."""
    if config.DISABLE_JIT:  # pyright: ignore[reportAttributeAccessIssue]
        return np.errstate(all="ignore")(rule.step)
    options: Any = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
    return njit(**options)(rule.step)


def _is_row(*given: Any) -> bool:
    return any(isinstance(one, lanes.Lanes) for one in given)


@overload(optim.root)
def _root(x):
    return (lambda x: lanes.root(x)) if _is_row(x) else (lambda x: np.sqrt(x))


@overload(optim.divide)
def _divide(a, b):
    return lambda a, b: a / b


@overload(optim.zero)
def _zero(like):
    if _is_row(like):
        return lambda like: lanes.filled(like, 0)
    number = np.float32 if like is types.float32 else np.float64
    return lambda like: number(0)


@overload(optim.above)
def _above(a, b, then, other):
    if _is_row(a, b):
        return lambda a, b, then, other: lanes.above(a, b, then, other)
    return lambda a, b, then, other: then if a > b else other
