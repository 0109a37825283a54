"""The operations that the rules of row optimizers call beside +, - and *: on one number, on an array, and, as the engine
defines them, in the vectors of its kernels. Each rounds once.
"""

from typing import Any

import numpy as np


def root(x: Any) -> Any:
    """Return the square root."""
    return np.sqrt(x)


def divide(a: Any, b: Any) -> Any:
    """Return a / b."""
    return a / b


def above(a: Any, b: Any, then: Any, other: Any) -> Any:
    """Return `then` where a > b, and `other` elsewhere, including where one of them is NaN."""
    return np.where(a > b, then, other)


def zero(like: Any) -> Any:
    """Return 0 of the same type."""
    return np.zeros_like(like)
