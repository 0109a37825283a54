"""The states of the random generators that a training script uses without naming one: saved with a checkpoint, and put
back when a run is resumed, so that a DataLoader's seed and dropout are what they would have been.
"""

import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The states of torch's, NumPy's and Python's own generators.

    >>> before = capture()
    >>> a = torch.rand(2)
    >>> restore(before)
    >>> torch.equal(a, torch.rand(2))
    True
    """
    version, words, gauss = random.getstate()
    name, key, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 the global one is meant
    state = {
        "torch": torch.get_rng_state(),
        "numpy": [name, np.asarray(key), position, has_gauss, cached],
        "python": [version, np.array(words, np.uint64), gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put captured states back."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
    version, words, gauss = state["python"]
    random.setstate((version, tuple(int(word) for word in words), gauss))
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) <= torch.cuda.device_count():
        for device, own in enumerate(state["cuda"]):
            torch.cuda.set_rng_state(own, device)
