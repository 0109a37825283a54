"""Training of nets from measured times, in torch; the trained nets are numpy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from skirl.placement.tables.nets import FEATURES, HEAD, HIDDEN, MOST, SUMS, ComputeNet, Mlp, scaled
from skirl.placement.tables.wire import UNITS

EPOCHS, TUNED = 150, 60
"""Epochs of training from scratch, and from a net that was trained elsewhere."""
BATCH, RATE, TUNED_RATE, DECAY = 64, 3e-3, 1e-3, 1e-2
DROPPED = 0.1
KEPT = 5
"""One set in this many tells when a net is best; nothing is learned from it."""


@dataclass(frozen=True)
class Sets:
    """Measured sets of parts, in the form that a net learns from.

    **Arguments**

    - `features`: features of all parts, [parts, FEATURES].
    - `base`: milliseconds of each part by a sum of terms.
    - `of`: number of the set that each part is in, from 0 on.
    - `ms`: measured milliseconds of each set.
    """

    features: np.ndarray
    base: np.ndarray
    of: np.ndarray
    ms: np.ndarray

    def some(self, which: np.ndarray) -> "Sets":
        """Return some of the sets, by their numbers."""
        number = np.full(len(self.ms), -1)
        number[which] = np.arange(len(which))
        mine = number[self.of] >= 0
        return Sets(self.features[mine], self.base[mine], number[self.of[mine]], self.ms[which])

    def told(self, net: ComputeNet | None) -> np.ndarray:
        """Return what a net predicts for each set; None: the sums of terms."""
        if net is None:
            return np.bincount(self.of, self.base, minlength=len(self.ms))
        factors, adds = net.parts(self.features)
        sums = np.stack([np.bincount(self.of, column, minlength=len(self.ms)) for column in adds.T], axis=1)
        return np.bincount(self.of, self.base * factors, minlength=len(self.ms)) * net.factors(sums)


def trained(sets: Sets, seed: int, start: ComputeNet | None = None) -> ComputeNet:
    """Train a net on these sets.

    **Arguments**

    - `sets`: measured sets.
    - `seed`: the random seed.
    - `start`: a net of another machine or setting, to start from.
    """
    generator = torch.Generator().manual_seed(seed)
    mean, deviation = (start.mean, start.deviation) if start else moments(sets.features)
    each, head = _module(len(FEATURES), HIDDEN, 1 + SUMS, generator), _module(SUMS, HEAD, 1, generator)
    if start is not None:
        _put(each, start.each)
        _put(head, start.head)
    x = torch.tensor(scaled(sets.features, mean, deviation), dtype=torch.float32)
    base, of = torch.tensor(sets.base, dtype=torch.float32), torch.tensor(sets.of)
    wanted = torch.tensor(np.log(sets.ms), dtype=torch.float32)
    order = torch.randperm(len(sets.ms), generator=generator)
    kept, rest = order[: len(order) // KEPT], order[len(order) // KEPT :]

    def errors(which: Tensor, drop: bool) -> Tensor:
        number = torch.full((len(sets.ms),), -1)
        number[which] = torch.arange(len(which))
        mine = number[of] >= 0
        at, seen = number[of][mine], x[mine]
        if drop:
            seen = seen * (torch.rand(seen.shape, generator=generator) > DROPPED)
        out = each(seen)
        parts = base[mine] * torch.exp(MOST * torch.tanh(out[:, 0] / MOST))
        total = torch.zeros(len(which)).index_add(0, at, parts)
        sums = torch.zeros(len(which), SUMS).index_add(0, at, F.softplus(out[:, 1:]))
        factor = MOST * torch.tanh(head(torch.log1p(sums))[:, 0] / MOST)
        return torch.log(total) + factor - wanted[which]

    parameters = [*each.parameters(), *head.parameters()]
    _learn(parameters, rest, lambda which, drop: F.huber_loss(*_zero(errors(which, drop)), delta=0.1),
           lambda: float(errors(kept, False).abs().mean()), generator, tuned=start is not None)  # fmt: skip
    return ComputeNet(mean, deviation, _mlp(each), _mlp(head))


def moments(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and deviation of features, with a deviation of 1 for those that never change.

    **Arguments**

    - `features`: [n, features].
    """
    deviation = features.std(axis=0)
    return features.mean(axis=0), np.where(deviation > 1e-6, deviation, 1.0)


def _learn(
    parameters: Sequence[Tensor], rest: Tensor, loss: Callable[[Tensor, bool], Tensor], held_out: Callable[[], float],
    generator: torch.Generator, tuned: bool,
) -> None:  # fmt: skip
    """Train with AdamW. Keep the parameters that had the least held-out error after any epoch, or at the start."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the nets are so small that threads would only wait for each other
    epochs, rate = (TUNED, TUNED_RATE) if tuned else (EPOCHS, RATE)
    optimizer = torch.optim.AdamW(parameters, rate, weight_decay=DECAY)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    with torch.no_grad():
        least, best = held_out(), [p.detach().clone() for p in parameters]
    for _ in range(epochs):
        for which in rest[torch.randperm(len(rest), generator=generator)].split(BATCH):
            optimizer.zero_grad()
            loss(which, True).backward()
            optimizer.step()
        slower.step()
        with torch.no_grad():
            error = held_out()
            if error < least:
                least, best = error, [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p, of in zip(parameters, best, strict=True):
            p.copy_(of)
    torch.set_num_threads(threads)


def _zero(errors: Tensor) -> tuple[Tensor, Tensor]:
    return errors, torch.zeros_like(errors)


def _module(inputs: int, units: int, outputs: int, generator: torch.Generator) -> nn.Sequential:
    """Return two layers; the last one starts near 0."""
    first, last = nn.Linear(inputs, units), nn.Linear(units, outputs)
    with torch.no_grad():
        for layer in (first, last):
            bound = layer.in_features**-0.5
            layer.weight.uniform_(-bound, bound, generator=generator)
            layer.bias.zero_()
        last.weight.mul_(0.1)
    return nn.Sequential(first, nn.ReLU(), last)


def _put(module: nn.Sequential, mlp: Mlp) -> None:
    with torch.no_grad():
        for p, of in zip(module.parameters(), vars(mlp).values(), strict=True):
            p.copy_(torch.tensor(of))


def _mlp(module: nn.Sequential) -> Mlp:
    of = [p.detach().numpy().astype(float) for p in module.parameters()]
    return Mlp(*of)


def regressed(x: np.ndarray, wanted: np.ndarray, seed: int) -> Mlp:
    """Train a net whose outputs are bounded logarithms.

    **Arguments**

    - `x`: [n, inputs], scaled.
    - `wanted`: [n, outputs].
    - `seed`: the random seed.
    """
    generator = torch.Generator().manual_seed(seed)
    made = _module(x.shape[1], UNITS, wanted.shape[1], generator)
    inputs, outputs = (torch.tensor(of, dtype=torch.float32) for of in (x, wanted))
    order = torch.randperm(len(x), generator=generator)
    kept, rest = order[: len(order) // KEPT], order[len(order) // KEPT :]

    def errors(which: Tensor) -> Tensor:
        return MOST * torch.tanh(made(inputs[which]) / MOST) - outputs[which]

    _learn([*made.parameters()], rest, lambda which, drop: F.huber_loss(*_zero(errors(which)), delta=0.1),
           lambda: float(errors(kept).abs().mean()), generator, tuned=False)  # fmt: skip
    return _mlp(made)
