"""The parts of TorchRec and FBGEMM that we rely on. Skirl accepts them by duck typing or compares with them; it never
imports them."""

import pytest
import torch

torchrec = pytest.importorskip("torchrec", reason="not installed: constraints/others.txt")
pytest.importorskip("fbgemm_gpu", reason="not installed: constraints/others.txt")


@pytest.mark.parametrize("given", ["lengths", "offsets"])
@pytest.mark.parametrize("weighted", [False, True])
def test_keyed_jagged_tensor_has_the_methods_we_read(given, weighted):
    values = torch.tensor([7, 8, 9, 7])
    weights = torch.tensor([1.0, 0.5, 0.25, 2.0]) if weighted else None
    splits = {"lengths": torch.tensor([2, 0, 1, 1]), "offsets": torch.tensor([0, 2, 2, 3, 4])}
    sparse = torchrec.KeyedJaggedTensor(keys=["user", "item"], values=values, weights=weights, **{given: splits[given]})
    assert sparse.keys() == ["user", "item"]
    assert sparse.values().tolist() == [7, 8, 9, 7]  # feature-major: both samples of user, then both of item
    assert sparse.lengths().tolist() == [2, 0, 1, 1]
    assert sparse.offsets().tolist() == [0, 2, 2, 3, 4]  # features * batch + 1 of them, from 0
    assert sparse.stride() == 2
    if weights is None:
        assert sparse.weights_or_none() is None
    else:
        assert torch.equal(sparse.weights_or_none(), weights)


def test_fbgemm_runs_its_row_wise_adagrad_on_the_cpu():
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(10, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.5,
        eps=0.0,
    )
    (weight,) = tables.split_embedding_weights()
    weight.fill_(1.0)
    bags = tables(torch.tensor([1, 2, 1]), torch.tensor([0, 2, 3]))
    assert bags.tolist() == [[2.0] * 4, [1.0] * 4]
    bags.sum().backward()
    # Row 1 is in both bags: gradient 2, mean square 4, step 0.5 * 2 / sqrt(4). Row 2: 0.5 * 1 / 1.
    assert weight[1].tolist() == [0.5] * 4
    assert weight[2].tolist() == [0.5] * 4
    assert weight[0].tolist() == [1.0] * 4
