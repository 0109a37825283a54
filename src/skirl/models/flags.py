"""The flags of models: which one, and any sizes that should differ from its paper."""

import inspect
from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from skirl.models.base import Model

CLASSES = {
    "dlrm": ("dlrm", "DLRM"),
    "wide-deep": ("wide_deep", "WideDeep"),
    "deep-cross": ("dcnv2", "DeepCross"),
    "deepfm": ("deepfm", "DeepFM"),
    "dcnv2": ("dcnv2", "DCNv2"),
    "din": ("din", "DIN"),
    "dcat": ("dcat", "DCAT"),
}
"""The module and class of each model by its name in `--model`; `NAME-tiny` stands for its `tiny`."""

if TYPE_CHECKING:
    ModelName = str
else:
    ModelName = Literal[tuple(f"{name}{size}" for name in CLASSES for size in ("", "-tiny"))]


@dataclass(frozen=True)
class ModelFlags:
    """The model, and the length of its vectors."""

    group: ClassVar[str] = "model"

    model: ModelName = "dlrm"
    """The model, with the sizes of its paper; NAME-tiny is a small one, for tests and first tries."""
    dim: int = 48
    """Length of a row's vector; rows of wide-deep and deepfm have one more number, the first-order weight."""

    @property
    def name(self) -> str:
        return self.model.removesuffix("-tiny")

    @property
    def tiny(self) -> bool:
        return self.model.endswith("-tiny")

    @property
    def kind(self) -> "type[Model]":
        from skirl.models.by_name import MODELS

        return MODELS[self.name]

    @property
    def row_dim(self) -> int:
        return self.kind.row_dim(self.dim)


@dataclass(frozen=True)
class LayerFlags:
    """Sizes and parts of the model, named as in its class. None keeps the value of the paper, or of -tiny."""

    group: ClassVar[str] = "model"

    _: KW_ONLY
    bottom: tuple[int, ...] | None = None
    """For dlrm and deep-cross: hidden layers for the dense features; by default those of the paper, or of -tiny."""
    top: tuple[int, ...] | None = None
    """For dlrm and deep-cross: hidden layers after the dot products or the cross layers."""
    deep: tuple[int, ...] | None = None
    """For wide-deep, deepfm, dcnv2, din and dcat: hidden layers."""
    dropout: float | None = None
    """For deepfm: the share of each hidden layer that dropout zeroes in a step."""
    cross: int | None = None
    """For deep-cross and dcnv2: the number of cross layers."""
    rank: int | Literal["full"] | None = None
    """For deep-cross and dcnv2: the rank of the cross layers' matrices."""
    structure: Literal["stacked", "parallel"] | None = None
    """For dcnv2: whether the hidden layers follow the cross layers or run in parallel."""
    activation: int | None = None
    """For din: the width of the activation unit."""
    width: int | None = None
    """For dcat: the width of the transformer."""
    heads: int | None = None
    """For dcat: the number of attention heads; twice this number must divide the width."""
    layers: int | None = None
    """For dcat: the number of the transformer's layers."""
    newest: int | None = None
    """For dcat: the most ids of a history that the transformer sees, the last ones."""

    def __post_init__(self) -> None:
        for name, value in self._set().items():
            if name == "dropout" and not 0 <= value < 1:
                raise ValueError(f"dropout is {value}: set it to 0 or more and below 1")
            if any(size < 1 for size in (value if isinstance(value, tuple) else [value]) if type(size) is int):
                raise ValueError(f"{name} is {value}: set it to 1 or more")

    def of_model(self, model: str) -> dict[str, Any]:
        """Return the flags that were set as arguments of the model's class. Raise if one is for another model."""
        from skirl.models.by_name import MODELS

        takes = {name: inspect.signature(kind.__init__).parameters for name, kind in MODELS.items()}
        for name in self._set():
            if name not in takes[model]:
                owners = " and ".join(other for other, parameters in takes.items() if name in parameters)
                raise ValueError(
                    f"{name} is a flag of {owners}, and {model} does not have it: leave it out, or set model to one of these"
                )
        return {name: None if value == "full" else value for name, value in self._set().items()}

    def _set(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
