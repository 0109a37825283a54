"""The empty Parameter that represents the rows of a collection among a model's parameters."""

import logging
import sys
from typing import Any

from torch import Tensor, nn

log = logging.getLogger("skirl")

_CLIPPING = "torch.nn.utils.clip_grad"


class Anchor(nn.Parameter):
    """Makes backward run if no other Parameter precedes the lookup; `requires_grad_` reaches it.

    Its gradient is empty too, and gone when backward returns: `torch.autograd.grad` can ask for it, but no norm
    includes it.
    """

    clips = False
    """True if the row optimizers of all tables clip gradients themselves."""
    said = False
    """True once the user has been warned that clipping gradients skips rows."""

    @classmethod
    def of(cls, nothing: Tensor, *, clips: bool) -> "Anchor":
        """Make an anchor from an empty tensor."""
        anchor = cls(nothing)
        anchor.clips = clips
        anchor.register_post_accumulate_grad_hook(_forget)
        return anchor

    @property
    def grad(self) -> Tensor | None:
        """None except during backward. If torch reads it to clip gradients, log a warning that rows are left out."""
        here = not (self.clips or self.said) and self.requires_grad
        if here and sys._getframe(1).f_globals.get("__name__") == _CLIPPING:
            self.said = True
            log.warning(
                "torch.nn.utils clips gradients, and leaves the rows of embeddings out: they are not Parameters, and "
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
