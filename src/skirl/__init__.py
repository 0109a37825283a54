"""skirl trains recommendation models whose embedding tables do not fit on the device.

Begin with `wrap(model, ...)`, which puts a cache behind the lookups of a model, or an `EmbeddingBagCollection` of `Table`s.
Pass the batches through `lookahead`, so that rows come ahead of the steps that need them. `save` and `load` are for
checkpoints, `size` advises on a cache.
"""

from typing import TYPE_CHECKING

from skirl.tools import __version__ as __version__
from skirl.tools import lazily

if TYPE_CHECKING:
    from skirl.checkpoint import Saving, load, save
    from skirl.checkpoint.export import export
    from skirl.checkpoint.import_rows import import_rows
    from skirl.cli.size import size
    from skirl.core.batch import Batch, KeyedJagged, moved
    from skirl.core.initial import Constant, Normal, Uniform
    from skirl.core.optim import FTRL, SGD, Adagrad, Adam, RowwiseAdagrad
    from skirl.core.tables import Table
    from skirl.data.encodings import Default, Grown, Hashed, InVocabulary, Longest
    from skirl.data.share import ShardSampler
    from skirl.nn.collection import EmbeddingBagCollection, EmbeddingCollection
    from skirl.nn.drop_ins import EmbeddingBag, Wrapped, wrap
    from skirl.nn.output import Output
    from skirl.pipeline.lookahead import Lookahead, lookahead
    from skirl.sweep.sweep import Sweep
    from skirl.sweep.variants import Variant
    from skirl.tools.sealed_json import CheckpointError
    from skirl.train.run_folder import lines_of

__all__ = [
    "FTRL", "SGD", "Adagrad", "Adam", "Batch", "CheckpointError", "Constant", "Default", "EmbeddingBag",
    "EmbeddingBagCollection", "EmbeddingCollection", "Grown", "Hashed", "InVocabulary", "KeyedJagged", "Longest",
    "Lookahead", "Normal", "Output", "RowwiseAdagrad", "Saving", "ShardSampler", "Sweep", "Table", "Uniform", "Variant",
    "Wrapped", "export", "import_rows", "lines_of", "load", "lookahead", "moved", "save", "size", "wrap",
]  # fmt: skip
_PACKAGES = ("data", "dedup", "lightning", "models", "nn", "store", "torchrec", "train")

__getattr__ = lazily(__name__, *_PACKAGES)


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES})
