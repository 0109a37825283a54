"""Whether a model's own loops can compute something here, or torch's operations have to."""

from functools import cache as remember

import torch
from numba import config
from torch import Tensor

from skirl.tools.lanes import check


def fit(*tensors: Tensor) -> bool:
    """Return whether our loops can take these tensors: on a CPU, of one dtype, and while no graph is captured."""
    dtype = tensors[0].dtype
    return (
        all(type(each) is Tensor and each.device.type == "cpu" and each.dtype == dtype for each in tensors)
        and dtype in (torch.float32, torch.float64)
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu"))
        and _lanes()
    )


@remember
def _lanes() -> bool:
    """Return whether kernels can use lanes here. If not, the engine logs why."""
    if config.DISABLE_JIT:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    try:
        check()
    except Exception:
        return False
    return True
