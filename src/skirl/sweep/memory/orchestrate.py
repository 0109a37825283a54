"""A step of all variants within a limit of memory: captured once, timed, planned and checked, then run."""

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from skirl.core.batch import Batch
from skirl.nn.output import Output
from skirl.sweep.contender import Contender
from skirl.sweep.memory.capture import Captured, Loss, capture, named_weights
from skirl.sweep.memory.execute import EmulatedLink, Pack, execute
from skirl.sweep.memory.passes import fakes_of
from skirl.sweep.memory.policy import Infeasible, Plan, Planner, fastest
from skirl.sweep.memory.simulate import Step

TIMED = 4
"""Runs from which the time of an operator is taken, as their median; the first does not count."""


class Memory:
    """Trains variants in steps that hold at most `limit` bytes, with the bits that they have without one.

    The limit counts weights, gradients and optimizer states of all variants, and what a step makes and looks up; not the
    cache and not the batch. A batch of other shapes is captured and planned anew: one of lists always. The first steps
    move away all that can be; their times of operators are what the plan of the others is made from.

    - `link`: what moves storages to the host and back.
    - `measures`: whether to sum up what is held, for `peak`.
    """

    def __init__(self, limit: int, link: EmulatedLink, *, measures: bool = False) -> None:
        self.limit, self.link, self.measures = limit, link, measures
        self.plan: Plan | None = None
        """Of the last step."""
        self.held = self.peak = 0
        """Bytes that variants hold between steps, and the most that a step held besides."""
        self._held: dict[Any, int] = {}
        self._captured: dict[Any, Captured] = {}
        self._steps: WeakKeyDictionary[Captured, Step] = WeakKeyDictionary()
        self._kinds: dict[Any, Step] = {}
        self._times: dict[Any, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._plans: dict[Any, Plan] = {}

    def step(self, contenders: Sequence[Contender], batch: Batch, loss: Loss) -> None:
        """Train these variants on the batch in the loop, as `Sweep.step` does."""
        key = tuple((each.name, any(w.grad is not None for w in each.model.parameters())) for each in contenders)
        if key not in self._held:
            self._held = {key: sum(persistent(each.model, each.dense) for each in contenders)}
        self.held = self._held[key]
        packs = [self._pack(contender, batch, loss) for contender in contenders]
        steps = tuple(self._timed(pack) for pack in packs)
        if (self.held, steps) not in self._plans:
            self._plans = {(self.held, steps): self._planned(steps)}
        self.plan = self._plans[self.held, steps]
        self.peak = max(self.peak, execute(self.plan.schedule, packs, self.link, measures=self.measures))

    def _planned(self, steps: Sequence[Step]) -> Plan:
        try:
            if all(step.seconds for step in steps):
                plan = fastest(steps, self.limit - self.held, self.link.rate)
            else:
                plan = Planner(steps, self.limit - self.held, self.link.rate).least()
            if plan.figures.peak > self.limit - self.held:
                raise Infeasible(plan.figures.peak, self.limit)
        except Infeasible as error:
            raise Infeasible(error.least + self.held, self.limit, f"{len(steps)} variants in turns need") from None
        plan.schedule.check(self.limit - self.held)
        return plan

    def _timed(self, pack: Pack) -> Step:
        """Return a pack's step, the same object for equal ones, with the times of operators if they are known."""
        if (step := self._steps.get(pack.captured)) is not None:
            return step
        step = pack.captured.step
        structure = tuple(step.operators.items())
        pack.times = self._times[structure]
        if min(map(len, pack.times.values()), default=0) < TIMED:
            return step
        step = replace(step, seconds={name: median(times[1:TIMED]) for name, times in pack.times.items()})
        kind = structure, *step.sizes.items(), step.entered
        self._steps[pack.captured] = self._kinds.setdefault(kind, step)
        return self._steps[pack.captured]

    def _pack(self, contender: Contender, batch: Batch, loss: Loss) -> Pack:
        """Return a variant as a pack: it looks its rows up when it enters, and is stepped when it leaves."""
        entered, key = list[Output](), (contender.name, batch.dense.shape, batch.labels.shape)

        def look_up() -> Output:
            with torch.enable_grad(), contender.turn():
                return contender.embeddings(batch.sparse)

        def enter() -> list[Tensor]:
            entered[:] = [look_up()]
            return captured.inputs(contender.model, entered[0].banks, batch)

        def leave(outputs: Sequence[Any]) -> None:
            kept, of_weights, of_rows = captured.results(outputs)
            loss, contender.kept = kept if isinstance(kept, tuple) else (kept, None)
            weights = dict(contender.model.named_parameters())
            for name, grad in zip(captured.trained, of_weights, strict=True):
                own = weights[name].grad
                weights[name].grad = own if grad is None else grad if own is None else own.add_(grad)
            with contender.turn():
                entered.pop().backward(of_rows, captured.live)
                contender.step(loss)

        if key not in self._captured or self._captured[key].of_batch:
            self._captured[key] = capture(contender.model, loss, look_up(), batch)
            contender.embeddings.current.out = None  # it holds rows, whose turn has not come
        captured = self._captured[key]
        return Pack(captured, enter, leave, contender.drawing)


def persistent(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of a model's weights and gradients and of its optimizer's states, also of those to come."""
    weights, states = [*named_weights(model).values()], {} if optimizer is None else optimizer.state
    if optimizer is not None and not states:
        own, states = copy.copy(optimizer), defaultdict(dict)
        trained = [weight for group in own.param_groups for weight in group["params"]]
        mode, fakes = fakes_of(trained)
        fake = dict(zip(trained, fakes, strict=True))
        own.state = states
        own.param_groups = [{**group, "params": [fake[w] for w in group["params"]]} for group in own.param_groups]
        with mode:
            for each in fakes:
                each.grad = torch.empty_like(each)
            own.step()
    held = [*weights, *(weight.grad for weight in weights), *tree_leaves([*states.values()])]
    return sum(each.nbytes for each in held if isinstance(each, Tensor))
