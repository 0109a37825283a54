"""skirl trains recommendation models whose embedding tables do not fit on the device."""

from skirl.checkpoint import Saving, load, save
from skirl.checkpoint.export import export
from skirl.checkpoint.import_rows import import_rows
from skirl.core.batch import Batch, KeyedJagged
from skirl.core.initial import Constant, Normal, Uniform
from skirl.core.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from skirl.core.tables import Table
from skirl.nn.bag import EmbeddingBag
from skirl.nn.collection import EmbeddingBagCollection, EmbeddingCollection, Pooled
from skirl.pipeline.lookahead import Lookahead, lookahead
from skirl.tools.sealed_json import CheckpointError

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
    "load",
    "lookahead",
    "save",
]
