"""skirl trains recommendation models whose embedding tables do not fit on the device."""

from skirl.batch import Batch, KeyedJagged
from skirl.checkpoint import Saving, load, save
from skirl.export import export
from skirl.importing import import_rows
from skirl.initial import Constant, Normal, Uniform
from skirl.lookahead import Lookahead, lookahead
from skirl.nn.bag import EmbeddingBag
from skirl.nn.modules import EmbeddingBagCollection, EmbeddingCollection, Pooled
from skirl.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from skirl.sealed import CheckpointError
from skirl.tables import Table

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
