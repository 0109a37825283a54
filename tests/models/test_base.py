"""What all models do with wrong and with missing inputs."""

import pytest
import torch

import skirl
from skirl.models import DIN, DLRM, DCNv2, DeepCross, DeepFM, Model, WideDeep
from tests.models.plain import DENSE, batches, collection

ALL = [DLRM, WideDeep, DeepCross, DeepFM, DCNv2, DIN]


class OfDims:
    """Has tables of the given dims, and no rows."""

    def __init__(self, *dims: int) -> None:
        self.tables = [skirl.Table(f"t{i}", rows=10, dim=dim) for i, dim in enumerate(dims)]

    def __call__(self, sparse: object) -> None:
        raise NotImplementedError


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
        kind.tiny(OfDims(1, 1))


@pytest.mark.parametrize("kind", ALL)
def test_a_models_state_goes_to_another(kind: type[Model]) -> None:
    """Only dense weights: rows are not in a state dict."""
    data = batches(1)[0]
    first, second = (kind.tiny(collection(kind.row_dim(8)), DENSE).eval() for _ in range(2))
    assert not torch.equal(first(data), second(data))
    state = {name: value for name, value in first.state_dict().items() if not name.endswith("_extra_state")}
    second.load_state_dict(state, strict=False)
    assert torch.equal(first(data), second(data))
