"""A step of all variants within a limit of memory: captured, timed, planned and checked once, then run."""

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from skirl.core.batch import Batch
from skirl.nn.output import Output
from skirl.sweep.contender import Contender
from skirl.sweep.memory.capture import Captured, Loss, capture, named_weights
from skirl.sweep.memory.execute import EmulatedLink, Executor, Link, Pack
from skirl.sweep.memory.passes import fakes_of
from skirl.sweep.memory.policy import Infeasible, Plan, Planner, fastest
from skirl.sweep.memory.simulate import Step

TIMED = 3
"""How often a step runs for the times of its operators, after one run that does not count."""


class Memory:
    """Trains variants in steps that hold at most `limit` bytes, with the bits that they have without one.

    The limit counts weights, gradients and optimizer states of all variants, and what a step makes and looks up; not the
    cache and not the batch. A batch of other shapes is captured and planned anew: one of lists always.

    - `link`: what moves storages to the host and back.
    - `measures`: whether to sum up the bytes that a step holds, as `executor.peak`.
    """

    def __init__(self, limit: int, link: Link, *, measures: bool = False) -> None:
        self.limit = limit
        self.executor = Executor(link, measures=measures)
        self.plan: Plan | None = None
        """Of the last step."""
        self.held = 0
        """Bytes that the variants of the last step hold between steps."""
        self._held: dict[Any, int] = {}
        self._captured: dict[Any, Captured] = {}
        self._kinds: dict[Any, Step] = {}
        self._times: dict[Any, dict[str, float]] = {}
        self._plans: dict[Any, Plan] = {}

    def step(self, contenders: Sequence[Contender], batch: Batch, loss: Loss) -> None:
        """Train these variants on the batch in the loop, as `Sweep.step` does."""
        self._count(contenders)
        captured = [self._capture(contender, batch, loss) for contender in contenders]
        packs = [_pack(*both, batch) for both in zip(contenders, captured, strict=True)]
        try:
            steps = tuple(self._timed(pack) for pack in packs)
            if (self.held, steps) not in self._plans:
                self._plans = {(self.held, steps): fastest(steps, self.limit - self.held, self.executor.link.rate)}
        except Infeasible as error:
            raise Infeasible(error.least + self.held, self.limit, f"{len(packs)} variants in turns need") from None
        self.plan = self._plans[self.held, steps]
        self.executor.run(self.plan.schedule, packs)

    def _count(self, contenders: Sequence[Contender]) -> None:
        key = tuple((each.name, any(w.grad is not None for w in each.model.parameters())) for each in contenders)
        if key not in self._held:
            self._held = {key: sum(persistent(each.model, each.dense) for each in contenders)}
        self.held = self._held[key]

    def _capture(self, contender: Contender, batch: Batch, loss: Loss) -> Captured:
        pooled = contender.embeddings.pooled
        lists = () if pooled else (batch.sparse.offsets().numpy().tobytes(), *batch.sparse.keys())
        key = contender.name, batch.dense.shape, batch.labels.shape, lists
        if key not in self._captured:
            if not pooled:
                self._captured = {other: one for other, one in self._captured.items() if other[0] != contender.name}
            self._captured[key] = capture(contender.model, loss, _looked_up(contender, batch), batch)
            contender.embeddings.current.out = None  # its turn has not come
        return self._captured[key]

    def _timed(self, pack: Pack) -> Step:
        """Return a pack's step with the time of each operator, the same object for equal ones. For the times it runs with
        all moved away that can be, so that it fits."""
        step = pack.captured.step
        structure = tuple(step.operators.values())
        kind = structure, *step.sizes.items(), step.entered
        if kind not in self._kinds:
            if structure not in self._times:
                plan = Planner([step], self.limit - self.held, inf).least()
                if plan.figures.peak > self.limit - self.held:
                    raise Infeasible(plan.figures.peak, self.limit - self.held)
                own, times = pack.for_times(), defaultdict[str, list[float]](list)
                with torch.random.fork_rng():
                    for _ in range(1 + TIMED):
                        Executor(EmulatedLink(inf), times=times).run(plan.schedule, [own])
                self._times[structure] = {name: median(several[1:]) for name, several in times.items()}
            self._kinds[kind] = replace(step, seconds=self._times[structure])
        return self._kinds[kind]


def _looked_up(contender: Contender, batch: Batch) -> Output:
    with torch.enable_grad(), contender.turn():
        return contender.embeddings(batch.sparse)


def _pack(contender: Contender, captured: Captured, batch: Batch) -> Pack:
    """Return a variant as a pack: it looks its rows up when it enters, and is stepped when it leaves."""
    entered = list[Output]()

    def enter() -> list[Tensor]:
        entered[:] = [_looked_up(contender, batch)]
        return captured.inputs(contender.model, entered[0].banks, batch)

    def leave(outputs: Sequence[Tensor | None]) -> None:
        kept, of_weights, of_rows = captured.results(outputs)
        loss, contender.kept = kept if isinstance(kept, tuple) else (kept, None)
        weights = dict(contender.model.named_parameters())
        for name, grad in zip(captured.trained, of_weights, strict=True):
            if grad is not None:
                own = weights[name].grad
                weights[name].grad = grad if own is None else own.add_(grad)
        with contender.turn():
            entered.pop().backward(of_rows, captured.live)
            contender.step(loss)

    return Pack(captured, enter, leave, contender.drawing)


def persistent(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of a model's weights and gradients and of its optimizer's states, also of those to come."""
    weights = dict.fromkeys(weight for _, weight in named_weights(model))
    held = [*weights, *(weight.grad for weight in weights)]
    if optimizer is not None:
        own = copy.copy(optimizer)
        own.state = defaultdict(dict, optimizer.state)
        if not own.state:
            trained = [weight for group in own.param_groups for weight in group["params"]]
            mode, fakes = fakes_of(trained)
            fake = dict(zip(trained, fakes, strict=True))
            own.param_groups = [{**group, "params": [fake[w] for w in group["params"]]} for group in own.param_groups]
            with mode:
                for each in fakes:
                    each.grad = torch.empty_like(each)
                own.step()
        held += tree_leaves([*own.state.values()])
    return sum(each.nbytes for each in held if isinstance(each, Tensor))
