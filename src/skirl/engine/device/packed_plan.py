"""A step's plan as the device needs it: all its arrays in one buffer, so that one copy brings them."""

from collections.abc import Mapping

import numpy as np
import torch

ALIGNED = 16
"""Each array begins at a multiple of this many bytes, for wide loads."""
_TORCH = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32", "float64", "uint8", "bool")}


class Packed:
    """The places of several arrays in one buffer.

    >>> arrays = {"slots": np.array([3, 4], np.int32), "keys": np.array([7], np.int64)}
    >>> packed = Packed(arrays)
    >>> packed.nbytes
    32
    >>> buffer = np.zeros(32, np.uint8)
    >>> packed.write(buffer)
    >>> packed.views(torch.from_numpy(buffer))["keys"]
    tensor([7])
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays
        self._at: dict[str, int] = {}
        self.nbytes = 0
        for name, array in arrays.items():
            self._at[name] = self.nbytes
            self.nbytes += -(-array.nbytes // ALIGNED) * ALIGNED

    def write(self, buffer: np.ndarray) -> None:
        """Copy all arrays to their places."""
        for name, array in self._arrays.items():
            at = self._at[name]
            buffer[at : at + array.nbytes].view(array.dtype)[:] = array.reshape(-1)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the arrays as tensors in a copy of the buffer, on any device."""
        return {
            name: buffer[at : at + array.nbytes].view(_TORCH[array.dtype]).view(array.shape)
            for (name, array), at in zip(self._arrays.items(), self._at.values(), strict=True)
        }
