"""Learning rates over a run, for rows and dense weights."""

import math
from typing import Any

import pytest
import torch

from skirl.train.schedule import Rates, Schedule


def test_factors_are_those_of_the_definitions():
    def factors(kind: Any, warmup: int = 0) -> list[float]:
        return [Schedule(kind, warmup, 8).factor(step) for step in range(9)]

    assert factors("constant", 2) == [0.5] + 8 * [1.0]
    assert factors("linear") == pytest.approx([1 - k / 8 for k in range(9)])
    assert factors("cosine") == pytest.approx([(1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)])
    assert factors("step") == 4 * [1.0] + 2 * [0.1] + 3 * [0.01]
    assert factors("linear", 4)[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75]


def test_another_schedule_than_the_saved_one_is_refused(tmp_path):
    weight = torch.nn.Parameter(torch.zeros(1))

    def rates(**schedule: Any) -> Rates:
        rows, dense = torch.optim.SGD([weight], lr=0.1), torch.optim.SGD([weight], lr=0.2)
        return Rates(Schedule(**schedule), rows=rows, dense=dense)

    first = rates(kind="linear", warmup=3, total=10)
    for _ in range(4):
        first.step()
    saved = first.state_dict()
    with pytest.raises(ValueError, match="--schedule is cosine, the run was saved with linear: set it to that"):
        rates(kind="cosine", warmup=3, total=10).load_state_dict(saved)
    with pytest.raises(ValueError, match="--warmup is 0, the run was saved with 3: set it to that"):
        rates(kind="linear", total=10).load_state_dict(saved)
    longer = rates(kind="linear", warmup=3, total=20)
    longer.load_state_dict(saved)
    factor = Schedule("linear", 3, 20).factor(4)
    assert longer.now == {"rows": 0.1 * factor, "dense": 0.2 * factor}
