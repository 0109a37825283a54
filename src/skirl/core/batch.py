"""The input of a training loop: the ids of many features, known by their methods, and a batch that carries them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from skirl.core.jagged import KeyedJagged as KeyedJagged


class Sparse(Protocol):
    """The methods that skirl calls on a batch's ids; TorchRec's KeyedJaggedTensor has them."""

    def keys(self) -> Sequence[str]: ...
    def values(self) -> torch.Tensor: ...
    def offsets(self) -> torch.Tensor: ...
    def weights_or_none(self) -> torch.Tensor | None: ...


def moved(tensor: torch.Tensor, at: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy a tensor to a device without waiting for a GPU that is still busy.

    A plain `to` from ordinary memory returns only after the GPU has finished everything queued before. A copy from pinned
    memory is queued on the stream.

    **Arguments**

    - `tensor`: the tensor to copy. If it is not in CPU memory or requires a gradient, a plain `to` copies it.
    - `at`: the device to copy it to.
    - `dtype`: its dtype there; None keeps its own.
    """
    tensor = tensor.to(dtype or tensor.dtype)
    waits = tensor.device.type != "cpu" or tensor.requires_grad or torch.compiler.is_compiling()
    if at.type != "cuda" or waits:
        return tensor.to(at)
    return tensor.contiguous().pin_memory().to(at, non_blocking=True)


@dataclass
class Batch:
    """Samples of a click log, as skirl's own readers yield them.

    **Arguments**

    - `dense`: `[batch, dense features]`, float32.
    - `sparse`: the ids: a KeyedJagged, or anything with its methods.
    - `labels`: `[batch]`, float32: 1 for a click. `[batch, labels]` if the data has several labels.
    """

    dense: torch.Tensor
    sparse: Any
    labels: torch.Tensor
