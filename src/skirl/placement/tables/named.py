"""Names of the kernels whose costs are measured, and of pools of tables."""

from typing import Literal, get_args

Backend = Literal["skirl-cpu", "fbgemm-cpu", "skirl-cuda", "fbgemm-cuda"]
OURS: Backend = "skirl-cpu"
"""The one whose costs come with skirl."""
PRODUCTION = "production"
Pool = Literal["production", "criteo-kaggle", "criteo-terabyte", "mlperf"]
"""Pools of tables by name, for costs; `production` is the generated one."""
BACKENDS: tuple[Backend, ...] = get_args(Backend)
ON_GPU: tuple[Backend, ...] = ("skirl-cuda", "fbgemm-cuda")


def flag_of(backend: str) -> str:
    """Return the flag that names a backend, as advice adds it to a command.

    **Arguments**

    - `backend`: its name.

    >>> flag_of("fbgemm-cpu"), flag_of("skirl-cpu")
    (' --backend fbgemm-cpu', '')
    """
    return "" if backend == OURS else f" --backend {backend}"
