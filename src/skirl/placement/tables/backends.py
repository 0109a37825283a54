"""The kernels whose costs are measured: where each is run, or in a sentence why it cannot be."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from skirl.placement.tables.named import ON_GPU, OURS, Backend

if TYPE_CHECKING:
    from skirl.placement.tables.costs import Costs
    from skirl.placement.tables.measure import MeasuredTables
    from skirl.placement.tables.spec import TableSpec

_SHOWN = 60
INSTALL = "pip install fbgemm_gpu-cpu, or fbgemm_gpu for a GPU, of the release for this torch"


def missing(backend: Backend) -> str | None:
    """Return why a backend cannot be measured here, and what to do; None if it can.

    **Arguments**

    - `backend`: its name.
    """
    import torch

    if backend in ON_GPU and not torch.cuda.is_available():
        return (
            f"backend {backend} runs on a GPU, and torch {torch.__version__} sees none: measure on a machine that has one, "
            f"or set --backend to {backend.replace('cuda', 'cpu')}"
        )
    if backend == "skirl-cuda" and find_spec("triton") is None:
        return f"backend {backend} needs Triton, which is not installed: pip install 'skirl[gpu]'"
    if not backend.startswith("fbgemm"):
        return None
    if find_spec("fbgemm_gpu") is None:
        return f"backend {backend} needs FBGEMM, which is not installed: {INSTALL}"
    try:
        import fbgemm_gpu
        from fbgemm_gpu import split_table_batched_embeddings_ops_training  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:  # of another release than torch, or a library is missing
        return f"backend {backend} needs FBGEMM, which does not load ({str(error).partition(chr(10))[0]}): {INSTALL}"
    if backend in ON_GPU and getattr(fbgemm_gpu, "__variant__", "") == "cpu":
        return f"backend {backend} needs FBGEMM's CUDA build, and its CPU build is installed: {INSTALL}"
    return None


def check_there(backend: Backend) -> None:
    """Raise if a backend cannot be measured here.

    **Arguments**

    - `backend`: its name.
    """
    if (why := missing(backend)) is not None:
        raise ValueError(why)


def measured_elsewhere(costs: "Costs") -> str | None:
    """Return the processor or the GPU that costs were measured on, if this machine has another one; None also if it is not
    known.

    **Arguments**

    - `costs`: the costs.
    """
    from skirl.tools.machine import machine

    if costs.machine is None:
        return None
    there, here = costs.machine["processor"], machine()["processor"]
    if costs.backend in ON_GPU:
        import torch

        there = costs.machine["device"]
        here = torch.cuda.get_device_properties(0).name if torch.cuda.is_available() else None
    return None if there == here else there[:_SHOWN]


def arena_of(backend: Backend = OURS) -> "MeasuredTables":
    """Return the memory in which a backend is measured, and which runs it. Raise if it cannot be measured here.

    **Arguments**

    - `backend`: its name.
    """
    check_there(backend)
    if backend == "skirl-cpu":
        from skirl.placement.tables.measure import MeasuredTables

        return MeasuredTables()
    if backend == "skirl-cuda":
        from skirl.placement.tables.gpu import GpuArena

        return GpuArena()
    from skirl.placement.tables.fbgemm import FbgemmArena, FbgemmCudaArena

    return FbgemmArena() if backend == "fbgemm-cpu" else FbgemmCudaArena()


def check_optimizers(backend: Backend, names: tuple[str, ...]) -> None:
    """Raise if a backend lacks one of some row optimizers.

    **Arguments**

    - `backend`: its name.
    - `names`: names of row optimizers.
    """
    if backend.startswith("fbgemm"):
        from skirl.placement.tables.fbgemm import check_optimizers

        check_optimizers(names, "cuda" if backend in ON_GPU else "cpu")


def check_dims(backend: Backend, tables: "Sequence[TableSpec]") -> None:
    """Raise if a backend cannot run the dim of one of some tables.

    **Arguments**

    - `backend`: its name.
    - `tables`: the tables.
    """
    if backend.startswith("fbgemm"):
        from skirl.placement.tables.fbgemm import check_dim

        for spec in tables:
            check_dim(spec.name, spec.dim)
