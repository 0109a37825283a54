"""The states of the random generators that a training script uses without naming one, saved with a checkpoint."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_own: dict[str, Any] | None = None
"""States of the run's generators, while others are in their place."""


def swap_in(*seed: int) -> None:
    """Seed the generators, until `swap_out` restores those of the run."""
    global _own
    if _own is None:
        _own = capture()
    words = np.random.SeedSequence(seed).generate_state(4)
    torch.default_generator.manual_seed(int(words[0]) << 31 | int(words[1]))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(int(words[0]) << 31 | int(words[1]))
    np.random.seed(words[2])  # noqa: NPY002
    random.seed(int(words[3]))


def swap_out() -> None:
    global _own
    own, _own = _own, None
    if own is not None:
        restore(own)


@contextmanager
def unchanged() -> Iterator[None]:
    now = _now()
    try:
        yield
    finally:
        _put(now)


def capture() -> dict[str, Any]:
    """Return the states of torch's, NumPy's and Python's own generators: the run's, if others are in their place."""
    return _now() if _own is None else _own


def restore(state: dict[str, Any]) -> None:
    """Restore captured states; if others are in place of the run's, `swap_out` will restore them."""
    global _own
    if _own is None:
        _put(state)
    else:
        _own = state


def of_torch() -> list[torch.Tensor]:
    """Return the states of torch's generators: on the CPU, and on GPUs that are in use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def put_torch(states: Sequence[torch.Tensor]) -> None:
    """Put states in their place, on GPUs only if all are here."""
    cpu, *cuda = states
    torch.set_rng_state(cpu)
    if cuda and torch.cuda.is_available() and len(cuda) <= torch.cuda.device_count():
        for device, own in enumerate(cuda):
            torch.cuda.set_rng_state(own, device)


def _now() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    name, key, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 the global one is meant
    cpu, *cuda = of_torch()
    return {
        "torch": cpu,
        "numpy": [name, np.asarray(key), position, has_gauss, cached],
        "python": [version, np.array(words, np.uint64), gauss],
        **({"cuda": cuda} if cuda else {}),
    }


def _put(state: dict[str, Any]) -> None:
    put_torch([state["torch"], *state.get("cuda", [])])
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
