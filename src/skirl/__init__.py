"""skirl trains recommendation models whose embedding tables do not fit on the device."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skirl.checkpoint import Saving, load, save
    from skirl.checkpoint.export import export
    from skirl.checkpoint.import_rows import import_rows
    from skirl.core.batch import Batch, KeyedJagged, moved
    from skirl.core.initial import Constant, Normal, Uniform
    from skirl.core.optim import SGD, Adagrad, Adam, RowwiseAdagrad
    from skirl.core.tables import Table
    from skirl.nn.bag import EmbeddingBag
    from skirl.nn.collection import EmbeddingBagCollection, EmbeddingCollection, Pooled
    from skirl.pipeline.lookahead import Lookahead, lookahead
    from skirl.tools.sealed_json import CheckpointError
    from skirl.train.report.run_folder import lines_of

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Batch",
    "CheckpointError",
    "Constant",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "KeyedJagged",
    "Lookahead",
    "Normal",
    "Pooled",
    "RowwiseAdagrad",
    "Saving",
    "Table",
    "Uniform",
    "export",
    "import_rows",
    "lines_of",
    "load",
    "lookahead",
    "moved",
    "save",
]

_HOMES = {
    "checkpoint": ("Saving", "load", "save"),
    "checkpoint.export": ("export",),
    "checkpoint.import_rows": ("import_rows",),
    "core.batch": ("Batch", "KeyedJagged", "moved"),
    "core.initial": ("Constant", "Normal", "Uniform"),
    "core.optim": ("SGD", "Adagrad", "Adam", "RowwiseAdagrad"),
    "core.tables": ("Table",),
    "nn.bag": ("EmbeddingBag",),
    "nn.collection": ("EmbeddingBagCollection", "EmbeddingCollection", "Pooled"),
    "pipeline.lookahead": ("Lookahead", "lookahead"),
    "tools.sealed_json": ("CheckpointError",),
    "train.report.run_folder": ("lines_of",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_ROOMS = ("checkpoint", "data", "models", "nn", "store", "torchrec", "train")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: `skirl --help` then needs no torch, which takes 1.4 s."""
    if name in _HOME_OF:
        value = getattr(import_module(f"skirl.{_HOME_OF[name]}"), name)
    elif name in _ROOMS:
        value = import_module(f"skirl.{name}")
    else:
        raise AttributeError(f"module 'skirl' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
