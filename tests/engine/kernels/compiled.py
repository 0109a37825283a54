"""Compile what the launchers launch, for a GPU that is not present; print one line of JSON for each kernel.

    python -m tests.engine.kernels.compiled CAPABILITY [DIM,DTYPE[,OPTIMIZER]...]...

Run it as its own process, without TRITON_INTERPRET: a kernel is either interpreted or compiled, from its decoration on.
Triton asks a driver what to compile for, and a stand-in answers; `warmup` does all of a launch except the last step.
"""

import json
import re
import sys
from contextlib import redirect_stdout
from io import StringIO

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from skirl.core.optim import ROW_OPTIMIZERS
from skirl.engine.kernels import gpu
from skirl.engine.kernels.tree import Gradients


class NoGpu:
    """A driver that can only compile."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


LOGS: dict[str, str] = {}
"""The log of ptxas for each text that Triton gave it. A text that comes again is not compiled again."""


def usage(ptx: str) -> dict[str, int]:
    numbers = {"registers": r"Used (\d+) registers", "spilled": r"(\d+) bytes spill stores"}
    found = {name: re.search(number, LOGS[ptx]) for name, number in numbers.items()}
    assert found["registers"], f"ptxas says nothing of registers: {LOGS[ptx]!r}"
    return {name: int(match[1]) if match else 0 for name, match in found.items()}


def told(kernel, n, *args, tiles=1, **options):
    """Replaces `launch`: compile the kernel and print what became of it."""
    with redirect_stdout(StringIO()) as log:
        made = kernel.warmup(*args, grid=(1, tiles), enable_fp_fusion=False, **options)
    ptx = made.asm["ptx"]
    LOGS.setdefault(ptx, log.getvalue())
    operations = re.findall(r"^\s+(?:@\S+\s+)?([a-z][\w.:]*)", ptx, re.M)
    line = {
        "kernel": kernel.__name__,
        "rule": getattr(kernel.fn.__globals__.get("rule"), "__name__", None),
        "options": {name: str(value) for name, value in options.items()},
        "cache": str(args[2 if kernel.__name__ == "_fill" else 0].dtype),
        "fused": made.metadata.enable_fp_fusion,
        "shared": made.metadata.shared,
        "operations": {name: operations.count(name) for name in sorted(set(operations))},
        **usage(ptx),
    }
    print(json.dumps(line), flush=True)


def compile_all(dim: int, dtype: torch.dtype, optimizers: list[str]) -> None:
    half = dtype in (torch.float16, torch.bfloat16)
    real = torch.float32 if half else dtype
    n = 32
    index, keys = torch.zeros(n, dtype=torch.int32), torch.zeros(n, dtype=torch.int64)
    numbers, none, live = torch.zeros(n, dtype=real), torch.zeros(0, dtype=real), torch.ones(16, dtype=torch.bool)
    out, stretches = torch.zeros(n, dim, dtype=real), torch.zeros(4, 3, dtype=torch.int32)
    for name in optimizers:
        optimizer = ROW_OPTIMIZERS[name]()
        cache = torch.zeros(n, optimizer.width(dim), dtype=dtype)
        plain = name == "rowwise-adagrad"  # this one as most runs use it, the others with all that a kernel can do
        gpu.update(
            cache, dim, optimizer.rule, index, keys,
            Gradients(index, index, index, none if plain else numbers, out, live[:0] if plain else live),
            torch.zeros(16, 8, dtype=real), not plain, stretches, out, index,
            rounding=(1, 2) if half else None,
        )  # fmt: skip
        if plain:
            gpu.pool(cache, dim, index, index[:0], 16, none, out)
        if name == "sgd":
            gpu.pool(cache, dim, index, index, 16, numbers, out)
        if name == "adam":
            gpu.move(cache, index, cache, index)
            gpu.fill(keys, index, cache, dim, optimizer.width(dim), 5, index, numbers, torch.zeros(65536), 0.1)


def main() -> None:
    driver.set_active(NoGpu(int(sys.argv[1])))
    knobs.nvidia.dump_ptxas_log = True  # prints to standard output
    gpu.launch = told
    for dim, dtype, *names in (word.split(",") for word in sys.argv[2:]):
        compile_all(int(dim), getattr(torch, dtype), names or [*ROW_OPTIMIZERS])


if __name__ == "__main__":
    main()
