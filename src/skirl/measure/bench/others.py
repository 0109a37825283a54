"""FBGEMM's table-batched operator on the CPU, for benchmarks; loaded by name if it is installed."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from skirl.core.tables import Table

INSTALL = "fbgemm: not installed; pip install --no-deps -r constraints/others.txt"


def has_fbgemm() -> bool:
    """Return whether FBGEMM is installed."""
    return find_spec("fbgemm_gpu") is not None


def fbgemm(tables: Sequence[Table], *, lr: float, rowwise: bool = False, eps: float = 0.0) -> Any:
    """Return one module with all tables, whose backward applies SGD or row-wise Adagrad."""
    optimizers = import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType
    common = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    training = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    place = (common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
    return training.SplitTableBatchedEmbeddingBagsCodegen(
        [(table.rows, table.dim, *place) for table in tables],
        optimizer=optimizers.EXACT_ROWWISE_ADAGRAD if rowwise else optimizers.EXACT_SGD,
        learning_rate=lr,
        eps=eps,
        bounds_check_mode=common.BoundsCheckMode.NONE,
    )
