"""From traffic and costs to the time of a step: pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from skirl.measure.scaling.traffic import CRITICAL, KINDS, Traffic
from skirl.store.link import Link

IN_LOOP = 5
"""Messages to every other trainer that the loop waits for in a step: values, gradients, which tables have any, dense there
and back."""
WAITS = 4
"""Times in a step that the loop waits for a delay: values; gradients of rows, beside the flags; dense there, and back."""
AHEAD = 6
"""Messages to every other trainer beside the loop: two of ids, two that say which rows are critical, early values, late
gradients."""
BEND = 1.1
"""The curve bends where a step takes this many times as long as with the fewest trainers."""


@dataclass(frozen=True)
class Costs:
    """What a machine takes.

    **Arguments**

    - `compute`: seconds of a step of one trainer with all rows its own: forward, backward, both optimizers.
    - `cpu`: processor time in that.
    - `message`: processor time of a message to another trainer and of one from it.
    - `byte`: processor time of a byte that is sent and of one that is received.
    - `cores`: of one trainer; 0.5 where two share one.
    - `plan`: processor time of planning, instead of what was measured while counting.
    """

    compute: float
    cpu: float
    message: float
    byte: float
    cores: float
    plan: float | None = None


@dataclass(frozen=True)
class Step:
    """The time of a step, and what it is made of.

    **Arguments**

    - `trainers`: how many.
    - `seconds`: of a step.
    - `bound`: what bounds it: "compute", "wire", "messages", "planning" or "cores".
    - `parts`: seconds by what they are; the loop's are one after the other, all else goes on beside it.
    """

    trainers: int
    seconds: float
    bound: str
    parts: dict[str, float]


def step_of(traffic: Traffic, costs: Costs, link: Link) -> Step:
    """The time of a step.

    The loop computes while early values, late gradients and ids travel, and waits for all else; planning goes on beside it,
    and all of it shares the trainer's cores. A step takes the longest of the three.

    **Arguments**

    - `traffic`: of one trainer; what it sends it receives, in both directions at once.
    - `costs`: of its machine.
    - `link`: of each trainer to all others.
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
    return Step(traffic.trainers, seconds, bound, parts)


def bends(steps: Sequence[Step]) -> str:
    """Where the curve bends, and why, in a sentence.

    **Arguments**

    - `steps`: by rising numbers of trainers.

    >>> parts = {"compute": 1.0, "critical_wire": 0.0, "hidden_wire": 0.0, "messages": 0.0, "planning": 0.1, "cores": 0.5}
    >>> flat = Step(8, 1.0, "compute", parts)
    >>> bends([flat])
    'with 8 trainers a step takes 1.00 times its computation; it does not bend up to 8'
    >>> bends([flat, Step(16, 1.3, "messages", parts | {"messages": 0.3})])
    'with 8 trainers a step takes 1.00 times its computation; from 16 on it takes over 1.1 times as long, for messages'
    """
    first = steps[0]
    nothing = dict.fromkeys(first.parts, 0.0) | {"hidden_wire": first.parts["compute"]}
    times = first.seconds / first.parts["compute"]
    why = f", for {_cause(first, nothing)}" if times > BEND else ""
    said = f"with {first.trainers} trainers a step takes {times:.2f} times its computation{why}"
    bent = next((step for step in steps if step.seconds > BEND * first.seconds), None)
    if bent is None:
        return f"{said}; it does not bend up to {steps[-1].trainers}"
    return f"{said}; from {bent.trainers} on it takes over {BEND} times as long, for {_cause(bent, first.parts)}"


def _cause(step: Step, before: Mapping[str, float]) -> str:
    """What a step takes longer for than one with these parts."""
    if step.seconds in (step.parts["planning"], step.parts["cores"]):
        return "planning" if step.seconds == step.parts["planning"] else "work that the cores are too few for"
    compute = step.parts["compute"]
    more = {
        "critical rows and dense gradients on the wire": step.parts["critical_wire"] - before["critical_wire"],
        "early and late rows that do not fit beside it": max(compute, step.parts["hidden_wire"])
        - max(compute, before["hidden_wire"]),
        "messages": step.parts["messages"] - before["messages"],
    }
    return max(more, key=lambda name: more[name])


def changes(steps: Sequence[Step]) -> list[tuple[int, str, str]]:
    """The numbers of trainers at which something else bounds a step, with what did before and what does then.

    **Arguments**

    - `steps`: by rising numbers of trainers.
    """
    return [(b.trainers, a.bound, b.bound) for a, b in pairwise(steps) if a.bound != b.bound]


def shares(traffic: Traffic) -> dict[str, float]:
    """The share of each kind in the bytes of a step, and the share that the loop waits for.

    **Arguments**

    - `traffic`: of one trainer.
    """
    total = sum(traffic.bytes.values()) or 1.0
    out = {kind: traffic.bytes[kind] / total for kind in KINDS}
    return out | {"waited_for": sum(out[kind] for kind in CRITICAL)}
