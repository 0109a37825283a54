"""Pure functions from traffic and costs to the time of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from skirl.measure.scaling.traffic import CRITICAL, KINDS, StepTraffic
from skirl.store.link import Link

IN_LOOP = 5
"""Messages per step to every other trainer that the loop waits for: values, gradients, which tables have any, dense there
and back."""
WAITS = 4
"""Delays per step that the loop waits for: values; row gradients, along with the flags; dense there, and back."""
AHEAD = 6
"""Messages per step to every other trainer in the background: two of ids, two that say which rows are critical, early
values, late gradients."""
BEND = 1.1
"""The curve bends where a step takes over this many times as long as with the fewest trainers."""


@dataclass(frozen=True)
class StepCosts:
    """The costs of a step's parts on a machine, in seconds.

    **Arguments**

    - `compute`: wall clock time of a step of one trainer with all rows: forward, backward, both optimizers.
    - `cpu`: CPU time of that step.
    - `message`: CPU time to send a message to another trainer and receive one from it.
    - `byte`: CPU time to send a byte and receive one.
    - `cores`: cores of one trainer; 0.5 if two share one.
    - `plan`: CPU time of planning, instead of what was measured while counting.
    """

    compute: float
    cpu: float
    message: float
    byte: float
    cores: float
    plan: float | None = None


@dataclass(frozen=True)
class StepTime:
    """The time of a step and its parts.

    **Arguments**

    - `trainers`: the number of trainers.
    - `seconds`: the time of a step.
    - `bound`: what bounds it: "compute", "wire", "messages", "planning" or "cores".
    - `parts`: seconds by part; those of the loop add up, all others run in parallel with it.
    """

    trainers: int
    seconds: float
    bound: str
    parts: dict[str, float]


def step_of(traffic: StepTraffic, costs: StepCosts, link: Link) -> StepTime:
    """Predict the time of a step.

    The loop computes while early values, late gradients and ids travel, and waits for everything else. Planning runs in
    parallel, and all of it shares the trainer's cores. A step takes as long as the longest of the three.

    **Arguments**

    - `traffic`: that of one trainer, which sends as much as it receives, in both directions at once.
    - `costs`: those of its machine.
    - `link`: the link of each trainer to all others.
    """
    others = traffic.trainers - 1
    size = traffic.bytes
    waited = traffic.busiest * (size["values_critical"] + size["gradients_critical"]) + size["dense"]
    hidden = traffic.busiest * (size["values_early"] + size["gradients_late"]) + size["ids"] + size["links"]
    plan = traffic.plan_ms / 1e3 if costs.plan is None else costs.plan
    parts = {
        "compute": costs.compute,
        "critical_wire": waited / link.rate,
        "hidden_wire": hidden / link.rate,
        "messages": (IN_LOOP * others * costs.message + WAITS * link.delay) if others else 0.0,
        "planning": plan + AHEAD * others * costs.message,
        "cores": (costs.cpu + plan + (IN_LOOP + AHEAD) * others * costs.message + costs.byte * sum(size.values()))
        / costs.cores,
    }
    beside = max(parts["compute"], parts["hidden_wire"])
    loop = beside + parts["critical_wire"] + parts["messages"]
    seconds = max(loop, parts["planning"], parts["cores"])
    if seconds == loop:
        wire = parts["critical_wire"] + (parts["hidden_wire"] if beside > parts["compute"] else 0.0)
        shares = {"compute": beside if beside == parts["compute"] else 0.0, "wire": wire, "messages": parts["messages"]}
        bound = max(shares, key=lambda name: shares[name])
    else:
        bound = "planning" if seconds == parts["planning"] else "cores"
    return StepTime(traffic.trainers, seconds, bound, parts)


def bends(steps: Sequence[StepTime]) -> str:
    """Say in a sentence where the curve bends, and why.

    **Arguments**

    - `steps`: steps by increasing number of trainers.

    >>> parts = {"compute": 1.0, "critical_wire": 0.0, "hidden_wire": 0.0, "messages": 0.0, "planning": 0.1, "cores": 0.5}
    >>> flat = StepTime(8, 1.0, "compute", parts)
    >>> bends([flat])
    'with 8 trainers a step takes 1.00 times its computation; it does not bend up to 8'
    >>> bends([flat, StepTime(16, 1.3, "messages", parts | {"messages": 0.3})])
    'with 8 trainers a step takes 1.00 times its computation; from 16 on it takes over 1.1 times as long because of messages'
    """
    first = steps[0]
    nothing = dict.fromkeys(first.parts, 0.0) | {"hidden_wire": first.parts["compute"]}
    times = first.seconds / first.parts["compute"]
    why = f" because of {_cause(first, nothing)}" if times > BEND else ""
    said = f"with {first.trainers} trainers a step takes {times:.2f} times its computation{why}"
    bent = next((step for step in steps if step.seconds > BEND * first.seconds), None)
    if bent is None:
        return f"{said}; it does not bend up to {steps[-1].trainers}"
    return f"{said}; from {bent.trainers} on it takes over {BEND} times as long because of {_cause(bent, first.parts)}"


def _cause(step: StepTime, before: Mapping[str, float]) -> str:
    """Return why a step takes longer than one with the parts `before`."""
    if step.seconds in (step.parts["planning"], step.parts["cores"]):
        return "planning" if step.seconds == step.parts["planning"] else "more work than the cores can do"
    compute = step.parts["compute"]
    more = {
        "critical rows and dense gradients on the wire": step.parts["critical_wire"] - before["critical_wire"],
        "early and late rows that do not fit beside it": max(compute, step.parts["hidden_wire"])
        - max(compute, before["hidden_wire"]),
        "messages": step.parts["messages"] - before["messages"],
    }
    return max(more, key=lambda name: more[name])


def changes(steps: Sequence[StepTime]) -> list[tuple[int, str, str]]:
    """Return the numbers of trainers at which the bound of a step changes, each with the old and the new bound.

    **Arguments**

    - `steps`: steps by increasing number of trainers.
    """
    return [(b.trainers, a.bound, b.bound) for a, b in pairwise(steps) if a.bound != b.bound]


def shares(traffic: StepTraffic) -> dict[str, float]:
    """Return the share of each kind in the bytes of a step, and the share that the loop waits for.

    **Arguments**

    - `traffic`: that of one trainer.
    """
    total = sum(traffic.bytes.values()) or 1.0
    out = {kind: traffic.bytes[kind] / total for kind in KINDS}
    return out | {"waited_for": sum(out[kind] for kind in CRITICAL)}
