"""The flags of models: what a model is made of, where it shall not be what its paper says.

One list for all models, each flag by the name that the models' constructors give it, and none means what the paper, or
`tiny`, has. A subcommand for each model would show only its own flags, and `skirl train` could not be called without it. So
a flag of another model is refused by name.
"""

import inspect
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal

from skirl.models.base import Model
from skirl.models.dcnv2 import Structure


@dataclass(frozen=True)
class ModelFlags:
    """Sizes and parts of the model.

    >>> from skirl.models import DCNv2, DLRM
    >>> ModelFlags(rank="full", deep=(32,)).sizes("dcnv2", {"dlrm": DLRM, "dcnv2": DCNv2})
    {'deep': (32,), 'rank': None}
    >>> ModelFlags(rank=4).sizes("dlrm", {"dlrm": DLRM, "dcnv2": DCNv2})
    Traceback (most recent call last):
    ValueError: rank is a flag of dcnv2, and model is dlrm: leave it out, or set the model
    """

    _: KW_ONLY
    bottom: tuple[int, ...] | None = None
    """Of dlrm and deep-cross: hidden layers that dense features go through; those of the paper, or of -tiny, if not set."""
    top: tuple[int, ...] | None = None
    """Of dlrm and deep-cross: hidden layers behind dot products, or cross layers."""
    deep: tuple[int, ...] | None = None
    """Of wide-deep, deepfm, dcnv2 and din: hidden layers."""
    rows_in_deep: bool | None = None
    """Of wide-deep: whether the hidden layers take rows; False: dense features alone."""
    dropout: float | None = None
    """Of deepfm: share of each hidden layer that a step leaves out."""
    cross: int | None = None
    """Of deep-cross and dcnv2: how many cross layers."""
    rank: int | Literal["full"] | None = None
    """Of deep-cross and dcnv2: of the cross layers' matrices."""
    structure: Structure | None = None
    """Of dcnv2: hidden layers behind the cross layers, or beside them."""
    activation: int | None = None
    """Of din: width of the activation unit."""
    target: str | None = None
    """Of din, over data without a list of ids from another feature's table: the feature that attends to the others; that of
    most rows if not set."""

    def sizes(self, model: str, models: Mapping[str, type[Model]]) -> dict[str, Any]:
        """What was set, as the model's class takes it; refused where another model's was set, or a value is none."""
        chosen = {f.name: getattr(self, f.name) for f in fields(ModelFlags) if getattr(self, f.name) is not None}
        takes = {name: inspect.signature(kind.__init__).parameters for name, kind in models.items()}
        for name, value in chosen.items():
            if name not in takes[model]:
                owners = " and ".join(other for other, parameters in takes.items() if name in parameters)
                raise ValueError(f"{name} is a flag of {owners}, and model is {model}: leave it out, or set the model")
            if name == "dropout" and not 0 <= value < 1:
                raise ValueError(f"dropout is {value}: set it to 0 or more and below 1")
            if any(size < 1 for size in (value if isinstance(value, tuple) else [value]) if type(size) is int):
                raise ValueError(f"{name} is {value}: set it to 1 or more")
        return {name: None if value == "full" else value for name, value in chosen.items()}
