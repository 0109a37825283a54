"""Dropout of a variant that trains in a thread beside others: from its own generator, with the same bits as torch's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def dropouts(model: Any) -> list[nn.Dropout]:
    """Return the modules of a model that are torch's own Dropout, unchanged.

    **Arguments**

    - `model`: the model; one that is not a module, or is compiled, has none.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in modules):
        return []
    return [module for module in modules if type(module) is nn.Dropout and "forward" not in vars(module)]


@contextmanager
def drawn_from(generator: torch.Generator, modules: Sequence[nn.Dropout]) -> Iterator[None]:
    """Let these modules draw from a generator in this block, instead of the process's own.

    **Arguments**

    - `generator`: a generator on the CPU.
    - `modules`: Dropout modules of one model.

    >>> layer, own, x = nn.Dropout(0.5), torch.Generator().manual_seed(7), torch.ones(100)
    >>> with drawn_from(own, [layer]):
    ...     drawn = layer(x)
    >>> _ = torch.manual_seed(7)
    >>> torch.equal(drawn, layer(x))
    True
    """
    with _instead(modules, partial(_drop, generator)):
        yield


class Watched:
    """Find out whether only some Dropout modules drew from the process's generator.

    **Arguments**

    - `modules`: the Dropout modules.
    """

    def __init__(self, modules: Sequence[nn.Dropout]) -> None:
        self._modules = modules
        self._last = torch.empty(0)
        self.alone = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this block; afterwards `alone` has the answer."""
        self._last = torch.get_rng_state()
        with _instead(self._modules, self._forward):
            yield
        self._drawn_by_others()

    def _forward(self, module: nn.Dropout, values: Tensor) -> Tensor:
        self._drawn_by_others()
        out = nn.Dropout.forward(module, values)
        self._last = torch.get_rng_state()
        return out

    def _drawn_by_others(self) -> None:
        self.alone = self.alone and torch.equal(self._last, torch.get_rng_state())


@contextmanager
def _instead(modules: Sequence[nn.Dropout], forward: Any) -> Iterator[None]:
    for module in modules:
        vars(module)["forward"] = partial(forward, module)
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["forward"]


def _drop(generator: torch.Generator, module: nn.Dropout, values: Tensor) -> Tensor:
    """The steps of torch's dropout on the CPU, which takes no generator (`_dropout_impl` in ATen's Dropout.cpp)."""
    if not module.training or not 0 < module.p < 1 or not values.numel():
        return nn.Dropout.forward(module, values)
    kept = torch.empty_like(values, requires_grad=False).bernoulli_(1 - module.p, generator=generator)
    kept.div_(1 - module.p)
    return values.mul_(kept) if module.inplace else values * kept
