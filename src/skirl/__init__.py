"""skirl trains recommendation models whose embedding tables do not fit on the device."""

from typing import TYPE_CHECKING

from skirl.tools.lazily import lazily

if TYPE_CHECKING:
    from skirl.checkpoint import Saving, load, save
    from skirl.checkpoint.export import export
    from skirl.checkpoint.import_rows import import_rows
    from skirl.core.batch import Batch, KeyedJagged, moved
    from skirl.core.initial import Constant, Normal, Uniform
    from skirl.core.optim import FTRL, SGD, Adagrad, Adam, RowwiseAdagrad
    from skirl.core.tables import Table
    from skirl.nn.bag import EmbeddingBag
    from skirl.nn.collection import EmbeddingBagCollection, EmbeddingCollection, Pooled
    from skirl.pipeline.lookahead import Lookahead, lookahead
    from skirl.tools.sealed_json import CheckpointError
    from skirl.train.report.run_folder import lines_of

__all__ = [
    "FTRL",
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

__getattr__ = lazily(
    __name__,
    {
        "checkpoint": ("Saving", "load", "save"),
        "checkpoint.export": ("export",),
        "checkpoint.import_rows": ("import_rows",),
        "core.batch": ("Batch", "KeyedJagged", "moved"),
        "core.initial": ("Constant", "Normal", "Uniform"),
        "core.optim": ("FTRL", "SGD", "Adagrad", "Adam", "RowwiseAdagrad"),
        "core.tables": ("Table",),
        "nn.bag": ("EmbeddingBag",),
        "nn.collection": ("EmbeddingBagCollection", "EmbeddingCollection", "Pooled"),
        "pipeline.lookahead": ("Lookahead", "lookahead"),
        "tools.sealed_json": ("CheckpointError",),
        "train.report.run_folder": ("lines_of",),
        **dict.fromkeys(("data", "models", "nn", "store", "torchrec", "train"), ()),
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "data", "models", "nn", "store", "torchrec", "train"})
