"""DIN against its formula, sample by sample and id by id."""

import pytest
import torch
from torch import Tensor

import skirl
from skirl.models import DIN
from tests.models.plain import DENSE, FEATURES, Rows, agree, batches, collection

D = 6


def prelu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x > 0, x, slope * x)


def deep(p: dict[str, Tensor], x: Tensor) -> Tensor:
    for at in (0, 2):
        x = prelu(x @ p[f"deep.{at}.weight"].T + p[f"deep.{at}.bias"], p[f"deep.{at + 1}.weight"])
    return x @ p["head.weight"][0] + p["head.bias"]


def unit(p: dict[str, Tensor], name: str, h: Tensor, t: Tensor) -> Tensor:
    """Apply the paper's layer to one behaviour and one target, over the concatenated vectors."""
    parts = [p[f"{name}.{part}.weight"] for part in ("of_behaviour", "of_target", "of_product")]
    hidden = torch.hstack(parts) @ torch.cat([h, t, h * t]) + p[f"{name}.of_behaviour.bias"]
    return p[f"{name}.rest.1.weight"][0] @ prelu(hidden, p[f"{name}.rest.0.weight"]) + p[f"{name}.rest.1.bias"]


def test_attention_over_features_agrees_with_its_formula() -> None:
    def formula(p: dict[str, Tensor], dense: Tensor, rows: Rows) -> Tensor:
        logits = []
        for b in range(len(dense)):
            own = {name: row[b] for name, row in rows.items()}
            t = own["bought"]
            interest = sum(unit(p, "units.0", h, t) * h for name, h in own.items() if name != "bought")
            logits.append(deep(p, torch.cat([dense[b], *own.values(), interest])))
        return torch.stack(logits)[:, 0]

    torch.manual_seed(0)
    model = DIN(collection(D), DENSE, target="bought", activation=7, deep=(9, 5))
    agree(model, formula, batches())
    assert DIN.tiny(collection(D), DENSE).target == FEATURES.index("user")  # the table with most rows


def history_of(sparse: skirl.KeyedJagged, feature: str, b: int) -> Tensor:
    at = FEATURES.index(feature) * sparse.stride() + b
    return sparse.values()[sparse.offsets()[at] : sparse.offsets()[at + 1]]


def test_attention_over_a_history_agrees_with_its_formula() -> None:
    """The bought item is the target, the clicked ones the behaviour; the user has lists and no target."""
    data = batches(one=["bought"])
    torch.manual_seed(0)
    model = DIN(collection(D, pooled=False), DENSE, lists=["user", "clicked"], activation=7, deep=(9, 5))
    assert model.history == {"clicked": "bought"}

    def formula(p: dict[str, Tensor], dense: Tensor, rows: Rows) -> Tensor:
        items, logits = rows.tables[1], []
        for b in range(len(dense)):
            t = rows["bought"][b]
            behaviour = items[history_of(rows.sparse, "clicked", b)]
            interest = sum((unit(p, "units.0", h, t) * h for h in behaviour), torch.zeros(D))
            logits.append(deep(p, torch.cat([dense[b], rows["user"][b], t, interest])))
        return torch.stack(logits)[:, 0]

    agree(model, formula, data)


def test_embeddings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="lists clicked id by id: set embeddings to an EmbeddingCollection"):
        DIN.tiny(collection(D), DENSE, lists=["clicked"])
