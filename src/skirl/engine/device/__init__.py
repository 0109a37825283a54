"""Devices that hold the cache and compute on it: host memory (`host.py`) or a GPU (`gpu.py`), as `base.py` defines."""

import numpy as np
import torch

from skirl.engine.device.base import Device


def torch_device(name: str | torch.device) -> torch.device:
    """Return where the tensors of a device are: for "interpret", which runs the GPU's code in Triton's interpreter, on the
    CPU. Raise if its name is unknown."""
    kind, _, index = str(name).partition(":")
    if str(name) in ("cpu", "interpret"):
        return torch.device("cpu")
    if kind == "cuda" and (index.isdecimal() or str(name) == "cuda"):
        return torch.device(str(name))
    raise ValueError(
        f"device is {str(name)!r}: set it to 'cpu', 'cuda' or 'cuda:N' (or 'interpret', to test the GPU's code without one)"
    )


def open_device(name: str | torch.device, dtype: np.dtype) -> Device:
    """Return the device of that name."""
    from skirl.engine.device.gpu import open_gpu
    from skirl.engine.device.host import Host

    at = torch_device(name)
    return Host(dtype) if str(name) == "cpu" else open_gpu(at, dtype)
