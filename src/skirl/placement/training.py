"""Training of nets from measured times, in torch; the trained nets are numpy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from skirl.placement.nets import FEATURES, HEAD, HIDDEN, MOST, SUMS, ComputeNet, Mlp, scaled

EPOCHS, TUNED = 150, 60
"""Epochs of training from scratch, and from a net that was trained elsewhere."""
BATCH, RATE, TUNED_RATE, DECAY = 64, 3e-3, 1e-3, 1e-2
DROPPED = 0.1
KEPT = 5
"""One set in this many tells when a net is best; nothing is learned from it."""


@dataclass(frozen=True)
class Sets:
    """Measured sets of parts.

    `features` [parts, FEATURES] and `base`, the milliseconds by a sum of terms, are those of each part; `of` is the set
    that it is in; `ms` are the measured milliseconds of each set.
    """

    features: np.ndarray
    base: np.ndarray
    of: np.ndarray
    ms: np.ndarray


def train_net(sets: Sets, seed: int, start: ComputeNet | None = None) -> ComputeNet:
    """Train a net on these sets, from one of another machine if it is given."""
    generator = torch.Generator().manual_seed(seed)
    if start is None:
        deviation = sets.features.std(axis=0)
        mean, deviation = sets.features.mean(axis=0), np.where(deviation > 1e-6, deviation, 1.0)
    else:
        mean, deviation = start.mean, start.deviation
    each, head = _module(len(FEATURES), HIDDEN, 1 + SUMS, generator), _module(SUMS, HEAD, 1, generator)
    if start is not None:
        for module, mlp in ((each, start.each), (head, start.head)):
            with torch.no_grad():
                for p, of in zip(module.parameters(), vars(mlp).values(), strict=True):
                    p.copy_(torch.tensor(of))
    x = torch.tensor(scaled(sets.features, mean, deviation), dtype=torch.float32)
    base, of = torch.tensor(sets.base, dtype=torch.float32), torch.tensor(sets.of)
    wanted = torch.tensor(np.log(sets.ms), dtype=torch.float32)

    def errors(which: Tensor, drop: bool) -> Tensor:
        number = torch.full((len(sets.ms),), -1)
        number[which] = torch.arange(len(which))
        inside = number[of] >= 0
        at, seen = number[of][inside], x[inside]
        if drop:
            seen = seen * (torch.rand(seen.shape, generator=generator) > DROPPED)
        out = each(seen)
        parts = base[inside] * torch.exp(MOST * torch.tanh(out[:, 0] / MOST))
        total = torch.zeros(len(which)).index_add(0, at, parts)
        sums = torch.zeros(len(which), SUMS).index_add(0, at, F.softplus(out[:, 1:]))
        factor = MOST * torch.tanh(head(torch.log1p(sums))[:, 0] / MOST)
        return torch.log(total) + factor - wanted[which]

    order = torch.randperm(len(sets.ms), generator=generator)
    kept, rest = order[: len(order) // KEPT], order[len(order) // KEPT :]
    parameters: Sequence[Tensor] = [*each.parameters(), *head.parameters()]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the nets are so small that threads would only wait for each other
    epochs, rate = (EPOCHS, RATE) if start is None else (TUNED, TUNED_RATE)
    optimizer = torch.optim.AdamW(parameters, rate, weight_decay=DECAY)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    least, best = float("inf"), list[Tensor]()
    for epoch in range(epochs + 1):
        if epoch:  # the start counts as well
            for which in rest[torch.randperm(len(rest), generator=generator)].split(BATCH):
                optimizer.zero_grad()
                off = errors(which, True)
                F.huber_loss(off, torch.zeros_like(off), delta=0.1).backward()
                optimizer.step()
            slower.step()
        with torch.no_grad():
            error = float(errors(kept, False).abs().mean())
            if error < least or not best:
                least, best = error, [p.detach().clone() for p in parameters]
    torch.set_num_threads(threads)
    numbers = [of.numpy().astype(float) for of in best]
    return ComputeNet(mean, deviation, Mlp(*numbers[:4]), Mlp(*numbers[4:]))


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
