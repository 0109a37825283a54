"""Costs of FBGEMM's operator, which TorchRec runs, for a planner: measured and fitted as `skirl place costs` does."""

from pathlib import Path

from skirl.placement.tables.asked import check_asked
from skirl.placement.tables.backends import check_optimizers, check_there
from skirl.placement.tables.calibrate import machine_costs
from skirl.placement.tables.costs import Costs
from skirl.placement.tables.named import Backend

BACKEND: Backend = "fbgemm-cpu"
ON_GPU: Backend = "fbgemm-cuda"
COMBINATIONS, MINUTES = 60, 0.5


def measure_costs(
    optimizer: str = "rowwise-adagrad", combinations: int = COMBINATIONS, seed: int = 0, *, device: str = "cpu",
    minutes: float = MINUTES, out: str | Path | None = None,
) -> Costs:  # fmt: skip
    """Measure what parts of tables cost FBGEMM's operator, on one thread of this CPU or on a GPU.

    The result is for `SkirlPlanner(costs=...)` and `hardware_config`. Random combinations of tables are timed in some
    rounds; a sum of terms and a net are fitted to the least times, and the one that is better on other tables predicts.

    **Arguments**

    - `optimizer`: the row optimizer: "rowwise-adagrad", the default of skirl's commands, "sgd", "adagrad", or on a GPU
      "adam".
    - `combinations`: number of random combinations of tables, and a quarter as many to judge by; 60 take a CPU some
      seconds.
    - `seed`: the random seed, 0: fixed so that a measurement can be repeated.
    - `device`: "cpu", which every machine has, or "cuda".
    - `minutes`: time for all rounds together; 0.5, so that a job can measure before it trains. Two are always
      measured.
    - `out`: a .json file for the costs, which `skirl place tables --costs` takes too; None writes none. Rounds are
      kept next to it until then, so that a killed measurement resumes.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}: set it to cpu or cuda")
    backend = BACKEND if device == "cpu" else ON_GPU
    check_optimizers(backend, (optimizer,))
    path = None if out is None else Path(out)
    check_asked(minutes, combinations, seed, path)
    check_there(backend)
    return machine_costs([optimizer], minutes, combinations, seed, path, backend=backend, quiet=True)[0]
