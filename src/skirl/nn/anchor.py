"""The Parameter that stands for the rows of a collection: of no numbers, found where a model's parameters are looked for."""

import logging
import sys
from typing import Any

from torch import Tensor, nn

log = logging.getLogger("skirl")

_CLIPPING = "torch.nn.utils.clip_grad"


class Anchor(nn.Parameter):
    """Makes backward run where no other Parameter comes before; `requires_grad_` reaches it.

    Its gradient is of no numbers either, and gone when backward returns: `torch.autograd.grad` can ask for it, and nothing
    adds it to a norm.
    """

    clips = False
    """Whether the row optimizers of all tables clip by themselves."""
    said = False
    """Whether it was said that who clips gradients leaves rows out."""

    @classmethod
    def of(cls, nothing: Tensor, *, clips: bool) -> "Anchor":
        """One over an empty tensor."""
        anchor = cls(nothing)
        anchor.clips = clips
        anchor.register_post_accumulate_grad_hook(_forget)
        return anchor

    @property
    def grad(self) -> Tensor | None:
        """None, but within a backward. Who asks in order to clip hears that rows are left out."""
        here = not (self.clips or self.said) and self.requires_grad
        if here and sys._getframe(1).f_globals.get("__name__") == _CLIPPING:
            self.said = True
            log.warning(
                "torch.nn.utils clips gradients, and leaves the rows of embeddings out: they are no Parameters, and "
                "backward has updated them already. To bound the gradient of each row set clip of their optimizer, such as "
                "skirl.Adagrad(lr=0.02, clip=1.0)"
            )
        return _GRAD.__get__(self)

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        _GRAD.__set__(self, grad)

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _GRAD.__delete__(self)


_GRAD: Any = Tensor.grad


def _forget(anchor: Tensor) -> None:
    anchor.grad = None
