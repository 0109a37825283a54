"""A step of all variants within a limit of memory: captured once, timed, planned and checked, then run."""

import copy
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from skirl.nn.output import Output
from skirl.sweep.capture import Dense, capture, hand_over, inputs_of, tensors_of
from skirl.sweep.contender import Contender, Loss, step_dense
from skirl.sweep.memory.execute import DeviceLink, Link, Pack
from skirl.sweep.memory.policy import Infeasible, Plan, Planner, fastest
from skirl.sweep.memory.schedule import Step, step_of
from skirl.sweep.passes import FakeTensorMode, call_loops
from skirl.tools.machine import free_bytes
from skirl.tools.units import parse_bytes

RATE = 32e9
"""Bytes a second to the host and back: PCIe 4."""
TIMED = 4
"""Runs from which the time of an operator is taken, as their median; the first does not count."""


class Memory:
    """Trains variants in steps that hold at most `limit` bytes, with the bits that they have without one.

    The limit counts weights, gradients and optimizer states of all variants, and what a step makes and looks up; not the
    cache and not the batch. A batch of other shapes is captured and planned anew. The first steps move away all that can
    be; their times of operators are what the plan of the others is made from.

    - `link`: what moves storages to the host and back.
    """

    def __init__(self, limit: int, link: Link) -> None:
        self.limit, self.link = limit, link
        self.plan: Plan | None = None
        """Of the last step."""
        self.held = 0
        """Bytes that variants hold between steps."""
        self._packs: dict[Any, Pack] = {}
        """By variant and layout of the batch."""
        self._batch: Any = None
        self._first: Contender
        """The one that looks up first in a step, and checks the ids for all."""
        self._kinds: dict[Any, Step] = {}
        self._of: Any = None
        """The variants, and whether they have gradients: what the plan was made for."""

    def step(self, contenders: Sequence[Contender], batch: Any, loss: Loss) -> None:
        """Train these variants on the batch in the loop, as `Sweep.step` does."""
        of = [(each.name, any(w.grad is not None for w in each.model.parameters())) for each in contenders]
        self._batch, self._first = batch, contenders[0]
        if of != self._of:
            self._of, self.plan = of, None
            self._packs = {key: pack for key, pack in self._packs.items() if key[0] in dict(of)}
            self.held = sum(persistent(each.model, each.dense) for each in contenders)
        packs = [self._pack(contender, batch, loss) for contender in contenders]
        steps = [pack.step for pack in packs]
        for step in steps:
            if not step.seconds and min(map(len, step.times.values()), default=0) >= TIMED:
                step.seconds, self.plan = {name: median(times[1:TIMED]) for name, times in step.times.items()}, None
        if self.plan is None or steps != self.plan.schedule.steps:
            self.plan = self._planned(steps)
        self._run(self.plan, packs)

    @torch.no_grad()
    def _run(self, plan: Plan, packs: Sequence[Pack]) -> None:
        for kind, pack, what in plan.schedule.actions:
            getattr(packs[pack], kind)(what)

    def _planned(self, steps: Sequence[Step]) -> Plan:
        room = self.limit - self.held
        plan = Planner(steps, room, self.link.rate).least()
        if plan.figures.peak > room:
            raise Infeasible(plan.figures.peak + self.held, self.limit)
        if all(step.seconds for step in steps):
            plan = fastest(steps, room, self.link.rate)
        plan.schedule.check(room)
        return plan

    def _pack(self, contender: Contender, batch: Any, loss: Loss) -> Pack:
        """Return a variant as a pack: it looks its rows up when it enters, and is stepped when it leaves."""
        key = contender.name, *(each.shape for each in tensors_of(batch)[0])
        if key in self._packs:
            return self._packs[key]
        captured = capture(Dense(contender.model, loss, contender.embeddings.look_up(batch), batch))
        contender.embeddings.current.out = None  # it holds rows, whose turn has not come
        call_loops(captured.graph)
        step = step_of(captured.graph, captured.rows)
        step = self._kinds.setdefault((*step.operators.items(), *step.sizes.items(), step.entered), step)
        entered = list[tuple[dict[str, Tensor], Output]]()

        def enter() -> list[Tensor]:
            rows = contender.embeddings.look_up(self._batch, checked=contender is not self._first)
            entered[:] = [(weights := inputs_of(contender.model), rows)]
            return [*weights.values(), *rows.banks, *tensors_of(self._batch)[0]]

        def leave(outputs: Sequence[Any]) -> None:
            hand_over(captured, contender, *entered.pop(), outputs)
            step_dense([contender])

        self._packs[key] = Pack(captured, step, self.link, enter, leave, contender.turn)
        return self._packs[key]


def planned(limit: str, device: torch.device) -> Memory:
    """Return what trains variants in steps that hold at most `limit`: a size, or auto, what is free now."""
    link = (DeviceLink if device.type == "cuda" else Link)(RATE)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes()
    return Memory(free if limit == "auto" else parse_bytes(limit), link)


def persistent(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of a model's weights and gradients and of its optimizer's states, also of those to come."""
    weights, states = [*inputs_of(model).values()], {} if optimizer is None else optimizer.state
    if optimizer is not None and not states:
        with FakeTensorMode(allow_non_fake_inputs=True):
            own = copy.deepcopy(optimizer)
            for weight in (weight for group in own.param_groups for weight in group["params"]):
                weight.grad = torch.empty_like(weight)
            own.step()
        states = own.state
    held = [*weights, *(weight.grad for weight in weights), *tree_leaves([*states.values()])]
    return sum(each.nbytes for each in held if isinstance(each, Tensor))
