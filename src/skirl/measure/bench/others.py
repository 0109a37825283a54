"""FBGEMM's table-batched operator on the CPU, for benchmarks; loaded by name if it is installed."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from skirl.core.jagged import KeyedJagged
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


def by_vbe(operator: Any, ids: KeyedJagged, dims: Sequence[int]) -> torch.Tensor:
    """Return an operator's output for each sample, `[batch, sum of dims]`, from a batch whose samples share bags.

    As TorchRec does with a batch of variable stride (VBE): the operator takes each bag once, and index_select copies its
    output to the samples that have it.

    **Arguments**

    - `operator`: what `fbgemm` returns.
    - `ids`: the batch; a plain one is given to the operator as it is.
    - `dims`: the numbers in a row of each feature.
    """
    if not ids.groups:
        return operator(ids.values(), ids.offsets())
    strides = ids.stride_per_key()
    per_rank = ids.stride_per_key_per_rank()
    flat = operator(ids.values(), ids.offsets(), batch_size_per_feature_per_rank=per_rank).flatten()
    parts = flat.split([stride * dim for stride, dim in zip(strides, dims, strict=True)])
    of = {name: inverse for names, inverse in ids.groups.items() for name in names}
    outs = [part.view(-1, dim) for part, dim in zip(parts, dims, strict=True)]
    keyed = zip(ids.keys(), outs, strict=True)
    return torch.cat([out.index_select(0, of[name]) if name in of else out for name, out in keyed], 1)
