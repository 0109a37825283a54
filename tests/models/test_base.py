"""What all models do with wrong and with missing inputs."""

import pytest
import torch

from skirl.models import DIN, DLRM, DCNv2, DeepCross, DeepFM, Model, WideDeep
from tests.models.plain import batches, collection

ALL = [DLRM, WideDeep, DeepCross, DeepFM, DCNv2, DIN]


@pytest.mark.parametrize("kind", ALL)
def test_no_dense_features_are_enough(kind: type[Model]) -> None:
    data = batches(1)[0]
    data.dense = data.dense[:, :0]
    model = kind.tiny(collection(kind.row_dim(8)), dense_features=0)
    model.loss(data).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", [WideDeep, DeepFM])
def test_rows_without_room_for_a_first_order_weight_are_refused(kind: type[Model]) -> None:
    with pytest.raises(ValueError, match="tables have dim 1: set dim to 2 or more"):
        kind.tiny(collection(1))
