"""The models of a sweep: each is made in turn, and checked to share nothing with the others."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skirl.nn.collection import Collection
from skirl.nn.optimizers import Anchor
from skirl.sweep.contender import Contender


def made_of(
    contender: Contender, make_model: Callable[[Contender], Any]
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Make a variant's model and the optimizer of its weights: Adam by default, None if it has no weights.

    **Arguments**

    - `contender`: the variant.
    - `make_model`: the function given to the sweep.
    """
    try:
        made = make_model(contender)
    except Exception as error:
        error.add_note(f"make_model was called for variant {contender.name!r}")
        raise
    model, *given = made if isinstance(made, tuple) else (made,)
    wrong = [one for one in given if one is not None and not isinstance(one, torch.optim.Optimizer)]
    if not isinstance(model, nn.Module) or len(given) > 1 or wrong:
        found = f"{type(model).__name__} with a {type(wrong[0]).__name__}" if wrong else type(made).__name__
        raise TypeError(
            f"make_model gave a {found} for variant {contender.name!r}: return a torch.nn.Module over "
            "variant.embeddings, or that and its torch.optim.Optimizer"
        )
    collections = [module for module in model.modules() if isinstance(module, Collection)]
    if any(module is not contender.embeddings for module in collections) or not collections:
        raise ValueError(
            f"the model of variant {contender.name!r} has {'other' if collections else 'no'} embeddings: make it over "
            "variant.embeddings, and over these alone"
        )
    weights = [weight for weight in model.parameters() if not isinstance(weight, Anchor)]
    if given:
        return model, given[0]
    return model, torch.optim.Adam(weights) if weights else None


def check_apart(contenders: Sequence[Contender]) -> None:
    """Raise if models share a module, a weight or an optimizer: training one variant would then change another.

    **Arguments**

    - `contenders`: the variants, with their models.
    """
    models: dict[int, str] = {}
    optimizers: dict[int, str] = {}
    owners: dict[int, tuple[str, str]] = {}
    for contender in contenders:
        other = models.setdefault(id(contender.model), contender.name)
        if other != contender.name:
            raise ValueError(
                f"make_model gave one module for variants {other!r} and {contender.name!r}: make a new one in each call"
            )
        other = optimizers.setdefault(id(contender.dense), contender.name)
        if contender.dense is not None and other != contender.name:
            raise ValueError(
                f"make_model gave one optimizer for variants {other!r} and {contender.name!r}: make a new one in each call"
            )
        for place, tensor in _own(contender.model):
            owner, there = owners.setdefault(tensor.untyped_storage().data_ptr(), (contender.name, place))
            if owner != contender.name:
                raise ValueError(
                    f"the models of variants {owner!r} and {contender.name!r} share the memory of {there!r} and {place!r}: "
                    "each trains weights of its own"
                )


def _own(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the tensors that training may change, by name: parameters and floating-point buffers."""
    found = [*model.named_parameters(), *((name, b) for name, b in model.named_buffers() if b.is_floating_point())]
    return [(name, tensor) for name, tensor in found if tensor.numel()]
