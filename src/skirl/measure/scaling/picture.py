"""Charts of `skirl simulate`."""

from collections.abc import Sequence

from skirl.measure.scaling.iteration import StepTime
from skirl.measure.scaling.traffic import StepTraffic
from skirl.train.report.plot import Chart, svg


def drawn(counted: Sequence[StepTraffic], steps: Sequence[StepTime], waiting: Sequence[StepTime], link: str) -> str:
    """Return charts over the number of trainers: the time of a step, its parts, and the bytes that a trainer sends.

    **Arguments**

    - `counted`: what a trainer sends.
    - `steps`: the steps with early and late vectors.
    - `waiting`: the steps if all vectors are critical.
    - `link`: the link as the flag gives it.
    """
    parts = {
        "compute": [(s.trainers, 1e3 * s.parts["compute"]) for s in steps],
        "early, late, ids": [(s.trainers, 1e3 * s.parts["hidden_wire"]) for s in steps],
        "critical, dense": [(s.trainers, 1e3 * s.parts["critical_wire"]) for s in steps],
        "messages": [(s.trainers, 1e3 * s.parts["messages"]) for s in steps],
        "planning": [(s.trainers, 1e3 * s.parts["planning"]) for s in steps],
    }
    kinds = {
        "critical rows": ("values_critical", "gradients_critical"),
        "early and late rows": ("values_early", "gradients_late"),
        "dense": ("dense",),
        "ids and bits": ("ids", "links"),
    }
    sizes = {
        name: [(one.trainers, sum(one.bytes[kind] for kind in of) / 1e6) for one in counted]
        for name, of in kinds.items()
    }
    return svg(
        [
            Chart(
                f"a step, {link}",
                "trainers",
                {
                    "early and late": [(s.trainers, 1e3 * s.seconds) for s in steps],
                    "all critical": [(s.trainers, 1e3 * s.seconds) for s in waiting],
                    "~computation": parts["compute"],
                },
                y="ms",
            ),
            Chart("its parts", "trainers", {name: _above(line) for name, line in parts.items()}, y="ms"),
            Chart("what a trainer sends in a step", "trainers", {n: _above(line) for n, line in sizes.items()}, y="MB"),
        ],
        columns=3,
        width=360,
    )


def _above(line: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Raise values to at least 0.001, so that a logarithmic axis can show them."""
    return [(x, max(y, 1e-3)) for x, y in line]
