"""DeepFM against its formula, pair by pair."""

from itertools import combinations

import torch
from torch import Tensor, nn

from skirl.models import DeepFM
from tests.models.plain import DENSE, Rows, agree, batches, collection, mlp

D = 6


def formula(p: dict[str, Tensor], dense: Tensor, rows: Rows) -> Tensor:
    fields = [row[:, :D] for row in rows.values()]
    fields += [torch.outer(dense[:, k], p["dense_vectors"][k]) for k in range(DENSE)]
    first = sum(row[:, D] for row in rows.values()) + (dense * p["dense_weights"]).sum(1)
    second = torch.stack([(a * b).sum(1) for a, b in combinations(fields, 2)]).sum(0)
    deep = mlp(p, "deep", torch.hstack(fields)) @ p["head.weight"][0] + p["head.bias"]
    return first + second + deep


def test_agrees_with_its_formula() -> None:
    torch.manual_seed(0)
    model = DeepFM(collection(D + 1), DENSE, deep=(9, 5), dropout=0)
    nn.init.normal_(model.dense_weights)
    nn.init.normal_(model.dense_vectors, std=0.2)
    agree(model, formula, batches())


def test_dropout_is_for_training_alone_and_seeded() -> None:
    data = batches(1)[0]
    model = DeepFM(collection(D + 1), DENSE, dropout=0.5)

    def logits() -> Tensor:
        torch.manual_seed(1)
        return model(data).detach()

    first, again = logits(), logits()
    assert torch.equal(first, again)
    model.eval()
    assert torch.equal(model(data), model(data)) and not torch.equal(model(data), first)
