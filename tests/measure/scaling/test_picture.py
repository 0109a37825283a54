"""The charts of `skirl simulate` in a browser, up to many trainers and with a link whose name is long."""

from collections.abc import Callable
from pathlib import Path

from skirl.measure.scaling.iteration import StepTime
from skirl.measure.scaling.picture import drawn
from skirl.measure.scaling.traffic import KINDS, StepTraffic
from tests.pages import NONE, mistakes

TRAINERS = [round(2 ** (1 + n / 3)) for n in range(25)]


def test_no_text_of_the_charts_is_cut_off_or_lies_on_a_line(browse: Callable[[Path], str], tmp_path: Path):
    """With lines that fill their charts from the lowest to the highest value."""
    names = ("compute", "hidden_wire", "critical_wire", "messages", "planning")
    counted, steps, waiting = [], [], []
    for n, trainers in enumerate(TRAINERS):
        parts = {name: (1e-6, 0.123, 98.7)[(n + k) % 3] for k, name in enumerate(names)}
        counted.append(
            StepTraffic(trainers, {kind: 1e3 ** ((n + k) % 4) for k, kind in enumerate(KINDS)}, 1e6, 1.5, 2.0)
        )
        steps.append(StepTime(trainers, sum(parts.values()), "wire", parts))
        waiting.append(StepTime(trainers, 3 * sum(parts.values()), "wire", parts))
    picture = drawn(counted, steps, waiting, "1.23456789Gbit,123.456789us")
    assert mistakes(browse, tmp_path, picture) == NONE
    assert picture.count("<polyline") == 3 + 5 + 4
