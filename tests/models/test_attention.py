"""DIN against its formula, sample by sample and id by id, and DCAT against an ordinary causal transformer over
[history, target], run for each sample by itself."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import skirl
from skirl.core.batch import Batch, KeyedJagged
from skirl.core.once import find
from skirl.models import DCAT, DIN, base, dcat, din
from skirl.models.base import Model
from tests.models.plain import DENSE, FEATURES, Rows, agree, batches, collection, mlp

D, WIDTH, HEADS, LAYERS, NEWEST = 6, 8, 2, 2, 3
SIZES = {"width": WIDTH, "heads": HEADS, "layers": LAYERS, "newest": NEWEST}


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
            t = own["user"]  # of the table with most rows
            interest = sum(unit(p, "units.0", h, t) * h for name, h in own.items() if name != "user")
            logits.append(deep(p, torch.cat([dense[b], *own.values(), interest])))
        return torch.stack(logits)[:, 0]

    torch.manual_seed(0)
    model = DIN(collection(D), DENSE, activation=7, deep=(9, 5))
    agree(model, formula, batches())


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


def linear(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def normed(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]


def last_state(p: dict[str, Tensor], history: Tensor, target: Tensor) -> Tensor:
    """Run the ordinary transformer on one whole sample, in order: it has no notion of a target and shares nothing."""
    rows = torch.cat([history[-NEWEST:], target[None]])
    n = len(rows)
    ages = torch.arange(n - 1, -1, -1.0)[:, None] / 10_000 ** (torch.arange(WIDTH // 2) / (WIDTH // 2))
    x = linear(p, "encoders.0.enter", rows) + torch.cat([ages.sin(), ages.cos()], dim=1)
    for layer in (f"encoders.0.layers.{i}" for i in range(LAYERS)):
        q, k, v = linear(p, f"{layer}.inputs", normed(p, f"{layer}.first", x)).split(WIDTH, dim=1)
        seen = []
        for head in (slice(i * WIDTH // HEADS, (i + 1) * WIDTH // HEADS) for i in range(HEADS)):
            scores = q[:, head] @ k[:, head].T / (WIDTH / HEADS) ** 0.5
            later = torch.ones(n, n).triu(1).bool()
            seen.append(scores.masked_fill(later, -torch.inf).softmax(1) @ v[:, head])
        x = x + linear(p, f"{layer}.output", torch.cat(seen, dim=1))
        hidden = torch.nn.functional.gelu(linear(p, f"{layer}.up", normed(p, f"{layer}.second", x)))
        x = x + linear(p, f"{layer}.down", hidden)
    return normed(p, "encoders.0.norm", x)[-1]


def made(kind: type[Model] = DCAT, **options: object) -> Model:
    torch.manual_seed(0)
    of = SIZES if kind is DCAT else {}
    return kind(collection(D, pooled=False), DENSE, lists=["user", "clicked"], **of, **options)  # type: ignore[arg-type]


def head(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return linear(p, "head", mlp(p, "deep", x))


def test_a_history_agrees_with_an_ordinary_transformer() -> None:
    """Lists of up to five ids, of which the transformer uses three."""

    def formula(p: dict[str, Tensor], dense: Tensor, rows: Rows) -> Tensor:
        logits = []
        for b in range(len(dense)):
            t = rows["bought"][b]
            state = last_state(p, rows.tables[1][history_of(rows.sparse, "clicked", b)], t)
            logits.append(head(p, torch.cat([dense[b], rows["user"][b], t, state])[None])[0])
        return torch.stack(logits)[:, 0]

    agree(made(deep=(9, 5)), formula, batches(2, longest=5, one=["bought"]))


def test_features_agree_with_an_ordinary_transformer() -> None:
    def formula(p: dict[str, Tensor], dense: Tensor, rows: Rows) -> Tensor:
        logits = []
        for b in range(len(dense)):
            own = {name: row[b] for name, row in rows.items()}
            others = torch.stack([row for name, row in own.items() if name != "user"])
            state = last_state(p, others, own["user"])
            logits.append(head(p, torch.cat([dense[b], *own.values(), state])[None])[0])
        return torch.stack(logits)[:, 0]

    torch.manual_seed(0)
    agree(DCAT(collection(D), DENSE, **SIZES, deep=(9, 5)), formula, batches(2))


SHAPES = {
    "sessions": ([4, 0, 2, 3], [0] * 9 + [1, 1, 2] + [3] * 8),
    "in no order": ([1, 3, 2], [2, 0, 2, 1, 0, 2, 2, 2, 2, 2, 2, 2]),
    "all equal": ([3], [0] * 7),
    "all empty": ([0, 0], [0, 1, 1]),
    "one sample": ([2], [0]),
    "all distinct": ([2, 1, 0], [0, 1, 2]),
}


@pytest.mark.parametrize("kind", [DCAT, DIN])
@pytest.mark.parametrize("shape", SHAPES)
def test_shared_histories_are_those_of_every_sample(kind: type[Model], shape: str) -> None:
    """The same batch with each history once and expanded: logits, gradients of weights, and rows after a step."""
    lengths, inverse = SHAPES[shape]
    samples, draw = len(inverse), torch.Generator().manual_seed(0)
    sizes = torch.tensor([2] * samples + lengths + [1] * samples)
    ids = KeyedJagged(
        FEATURES, torch.randint(0, 20, (int(sizes.sum()),), generator=draw), lengths=sizes,
        strides=[samples, len(lengths), samples], inverse={"clicked": torch.tensor(inverse)},
    )  # fmt: skip
    labels = torch.randint(0, 2, (samples,), generator=draw).float()
    batch = Batch(torch.randn(samples, DENSE, generator=draw), ids, labels)
    found = []
    for of in (batch, replace(batch, sparse=ids.expanded())):
        model = made(kind)
        model.loss(of).backward()
        grads = [p.grad for p in model.parameters() if p.numel()]
        rows = [model.embeddings.rows(t.name, range(t.rows)) for t in model.embeddings.tables]  # type: ignore[union-attr]
        found.append([model.eval()(of).detach(), *grads, *rows])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [DCAT, DIN])
@pytest.mark.parametrize("shape", SHAPES)
def test_torchs_operations_agree_where_our_loops_do_not_fit(
    kind: type[Model], shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (dcat, din):
        monkeypatch.setattr(module, "fit", lambda *tensors: False)
    test_shared_histories_are_those_of_every_sample(kind, shape)


def test_a_history_is_encoded_once() -> None:
    data = batches(1, samples=12, longest=4, one=["bought"])[0]
    repeated = data.sparse.with_bags({"clicked": torch.tensor([0, 1] * 6)})
    ids, counted = find(repeated, features=["clicked"]), []
    model = made()
    model.encoders[0].enter.register_forward_hook(lambda _, inputs, __: counted.append(len(inputs[0])))  # type: ignore[union-attr, operator, index]
    for of in (ids, repeated):
        model.eval()(replace(data, sparse=of))
    lengths = ids.lengths_by_sample()["clicked"][:2].clamp(max=NEWEST)
    ours = int(lengths.sum()) if base.fit(torch.zeros(1)) else 2  # our loops take ids without padding
    assert counted == [ours, 12, 12, 12]  # histories, then targets


def test_weights_of_a_list_are_refused() -> None:
    data = batches(1, one=["bought"])[0]
    ids, offsets = data.sparse.values(), data.sparse.offsets()
    weighted = skirl.KeyedJagged(FEATURES, ids, offsets=offsets, weights=torch.ones(len(ids)))
    with pytest.raises(ValueError, match="DCAT weighs the ids of a list itself"):
        made()(replace(data, sparse=weighted))
