"""What planned steps are tested and measured on: models and what eager torch makes of them, and steps without models."""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import skirl
from skirl.core.batch import Batch
from skirl.models import by_name
from skirl.sweep.capture import Dense, capture, inputs_of, tensors_of
from skirl.sweep.memory.execute import Link, Pack
from skirl.sweep.memory.policy import Plan
from skirl.sweep.memory.schedule import Action, Operator, Schedule, Step, step_of

FEATURES = [f"t{number}" for number in range(6)]
TABLES = [skirl.Table(name, 100, 8) for name in FEATURES]


def batch_of(samples: int, seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    ids = skirl.KeyedJagged.one_hot(FEATURES, torch.randint(0, 100, (samples, 6), generator=draw))
    dense, labels = torch.randn(samples, 4, generator=draw), torch.rand(samples, generator=draw).round()
    return Batch(dense=dense, sparse=ids, labels=labels)


class Transformer(nn.Module):
    """Over rows as a sequence: [batch, items, dim]."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 32, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def loss(self, batch: Batch) -> Tensor:
        x = self.embeddings(batch.sparse).stacked()
        for layer in self.layers:
            x = layer(x)
        return functional.binary_cross_entropy_with_logits(self.head(x.mean(1)).squeeze(1), batch.labels)


class Case:
    """A captured step, and what eager torch makes of it."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.batch = batch_of(32)
        embeddings = skirl.EmbeddingBagCollection(TABLES, optimizer=skirl.SGD(lr=0.1), cache="100%")
        self.model: Any = (
            Transformer(embeddings)
            if name == "transformer"
            else by_name.MODELS[name].tiny(embeddings, dense_features=4)
        )
        rows = embeddings(self.batch.sparse)
        self.captured = capture(Dense(self.model, lambda model, batch: model.loss(batch), rows, self.batch))
        self.step = step_of(self.captured.graph, self.captured.rows)
        self.inputs = [*inputs_of(self.model).values(), *rows.banks, *tensors_of(self.batch)[0]]
        loss = self.model.loss(self.batch)
        weights = dict(self.model.named_parameters())
        wanted = [weights[each] for each in self.captured.trained] + embeddings.current.out.banks
        self.eager = [loss.detach(), *torch.autograd.grad(loss, wanted)]

    def run(self, plan: Plan) -> tuple[list[Tensor], int]:
        """Return what a plan computes, and the most bytes that were held."""
        outputs, packs = list[Tensor](), list[Pack]()
        packs += [Pack(self.captured, self.step, Link(1e12), lambda: self.inputs, outputs.extend)]
        return outputs, measured(plan.schedule, packs)


class EmulatedLink(Link):
    """A link whose copies are waited for as long as it would take: benchmarks time steps over it."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self._free = [0.0, 0.0]

    def offload(self, data: Tensor, way: int = 0) -> Any:
        self._free[way] = max(time.perf_counter(), self._free[way]) + data.nbytes / self.rate
        return data.clone(), self._free[way]

    def reload(self, copied: Tensor, device: torch.device) -> Any:
        return self.offload(copied, 1)

    def wait(self, moving: Any) -> Tensor:
        time.sleep(max(0.0, moving[1] - time.perf_counter()))
        return moving[0]


@torch.no_grad()
def measured(schedule: Schedule, packs: Sequence[Pack]) -> int:
    """Run a schedule. Return the most bytes that were held: results, rows' outputs and what comes back, but not views of
    other inputs."""
    peaks = list[int]()

    def see() -> None:
        held = dict[int, int]()
        for pack in packs:
            rows = [value for name, value in pack.inputs.items() if name in pack.captured.rows]
            coming = [moving for storage, moving in pack.moving.items() if storage in pack.away]
            here = [each for each in tree_leaves([pack.results, coming, rows]) if isinstance(each, Tensor)]
            others = {
                each.untyped_storage()._cdata for name, each in pack.inputs.items() if name not in pack.captured.rows
            }
            storages = [each.untyped_storage() for each in here]
            held |= {each._cdata: each.nbytes() for each in storages if each._cdata not in others}
        peaks.append(sum(held.values()))

    for kind, pack, what in schedule.actions:
        getattr(packs[pack], kind)(what)
        if kind == "run":
            see()
    return max(peaks)


def on_demand_of(schedule: Schedule) -> Schedule:
    """Return a schedule in which what moves comes back when it is used."""
    first = list[Action]()
    for kind, pack, what in schedule.actions:
        first += [Action("reload", pack, what)] if kind == "back" else []
        first += [Action(kind, pack, what)] if kind != "reload" else []
    return replace(schedule, actions=first)


def drawn_step(draw: random.Random, layers: int, once: float = 0.0) -> Step:
    """A chain with skips, and a backward that takes some of what the forward made."""
    operators, sizes, seconds = {}, {}, {}
    names = [(f"{kind}{i}", i) for kind in "fb" for i in (range(layers) if kind == "f" else reversed(range(layers)))]
    for before, (name, i) in zip([None, *names], names, strict=False):
        reads = [before[0]] if before else []
        if name[0] == "f" and i > 1 and draw.random() < 0.4:
            reads.append(f"f{draw.randrange(i - 1)}")
        if name[0] == "b":
            reads += [f"f{each}" for each in (i - 1, i) if each >= 0 and (each < i or draw.random() < 0.3)]
        draws = name[0] == "f" and draw.random() < once
        made = (f"{name}.0",)
        operators[name] = Operator(tuple(dict.fromkeys(reads)), made, made, name[0] == "b", draws, draws)
        sizes[made[0]], seconds[name] = draw.randint(1, 20) * 100, draw.uniform(0.5, 2)
    return Step(operators, sizes, 100, ("b0",), seconds)


def chain(layers: int, size: int) -> Step:
    """Layers of 1 ms, with a backward of 2 ms that takes what each layer made."""
    forward = {f"f{i}": (f"f{i - 1}",) if i else () for i in range(layers)}
    backward = {f"b{i}": (f"b{i + 1}" if i < layers - 1 else f"f{i - 1}", f"f{i}") for i in reversed(range(layers))}
    made = {name: (f"{name}.0",) for name in forward | backward}
    operators = {
        name: Operator(reads, made[name], made[name], name in backward) for name, reads in (forward | backward).items()
    }
    return Step(
        operators, {f"{name}.0": size for name in made}, 0, ["b0"], {n: 0.001 * (1 + (n in backward)) for n in made}
    )
