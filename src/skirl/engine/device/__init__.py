"""Devices that hold the cache and compute on it: host memory (`host.py`) or a GPU (`gpu.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from skirl.core.ids import BankIds
from skirl.core.optim import Rule
from skirl.engine.kernels.tree import Parts
from skirl.engine.work import Work
from skirl.oracle.step import Step
from skirl.store.changes import Records


@dataclass(frozen=True)
class Columns:
    """The columns of a bank's records that are one pack's: a weight, and its optimizer's state."""

    at: int
    """The first of them."""
    dim: int
    width: int
    rule: Rule
    clips: bool
    seed: int
    filling: tuple[Any, ...]
    """What `fill` takes after the records, and after `first`, which GPUs do not take."""
    first: int = 0
    """The first of a table's columns that are here, if trainers have cut it."""

    @property
    def of_table(self) -> slice:
        return slice(self.first, self.first + self.dim)


@dataclass(frozen=True)
class BankFacts:
    number: int
    width: int
    """Numbers in a record, the columns of all packs. In half precision, words of two numbers."""
    packs: tuple[Columns, ...]
    features: int
    dtype: np.dtype
    half: torch.dtype | None = None
    """Dtype that rows are held in, if not `dtype`."""


def joined_scales(ids: Sequence[BankIds], dtype: np.dtype) -> np.ndarray:
    """Return the factors of all micro-batches' positions, with ones where only some micro-batches have factors."""
    if len(ids) == 1 or not any(len(i.scale) for i in ids):
        return ids[0].scale
    return np.concatenate([i.scale if len(i.scale) else np.ones(i.count, dtype) for i in ids])


def joined_bags(ids: Sequence[BankIds]) -> np.ndarray:
    if len(ids) == 1:
        return ids[0].bag_of
    starts = accumulate((i.bags for i in ids), initial=0)  # ints of Python, with which int32 stays int32
    return np.concatenate([i.bag_of + start for i, start in zip(ids, starts)])


class BankRows(Protocol):
    """The cache of one bank, the buffers of rows on their way, and the computation on them. Rows and gradients are
    torch tensors on the device; ids and keys are numpy arrays on the host, where the oracle plans."""

    facts: BankFacts

    def __init__(self, facts: BankFacts) -> None:
        self.facts = facts

    def columns(self, work: Work) -> Columns:
        return self.facts.packs[work.pack]

    def allocate(self, slots: int, staging_rows: int) -> Records:
        """Allocate the cache; the one before is gone. A GPU keeps free buffers of up to `staging_rows` rows."""
        ...

    def forget_moves(self) -> None: ...

    # A step's way. `arriving` and `shipped` run in the fetch stage, `written` in the write stage, the rest in the loop.

    def arriving(self, work: Work) -> tuple[Any, np.ndarray]:
        """Return a handle for a step's fetched rows, and the memory that the store reads them into."""
        ...

    def shipped(self, arrival: Any, work: Work) -> None:
        """The store has read the rows."""

    def load(self, work: Work, arrival: Any) -> Any:
        """Evict, forward, put what was fetched, and make new rows. Return a handle to the rows that leave."""
        ...

    def landed(self, leaving: Any) -> np.ndarray: ...

    def written(self, leaving: Any) -> None:
        """The store has taken the rows."""

    # Computing.

    def pool(self, work: Work, micro: int) -> torch.Tensor:
        """Return a micro-batch's output in the current step: [bags, dim], shared bags after the samples' rows."""
        ...

    def pool_rows(self, rows: np.ndarray, dim: int, ids: BankIds, place: np.ndarray) -> torch.Tensor:
        """Return the same from rows on the host, which begin with a weight. `place` is the index of each id's row."""
        ...

    def fold(self, ids: BankIds, grad: torch.Tensor | None, into: torch.Tensor) -> None:
        """Write the gradients of shared bags to `into`, [shared bags, dim]: sums over their samples, ascending, from 0."""

    def update(self, work: Work, scalars: np.ndarray, step: int) -> None:
        """Sum the gradients of every row of the current step and apply the optimizer once. `scalars`: the numbers of
        each table's optimizer, [tables, k]. `step` is part of the seed for rounding."""

    # The two halves of an update. The sums of other trainers come in between. Sums are values, [rows, dim], and bool
    # [rows], whether any position of the row had a gradient. A row without one has zeros, and is not updated.

    def values(self, work: Work) -> torch.Tensor:
        """Return the weights of the current step's rows, one for each position: [positions, dim]."""
        ...

    def sums(self, work: Work, block: range | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the gradients of every row: within each micro-batch, then along the tree. `block`: only these leaves."""
        ...

    def apply(
        self, work: Work, plan: Step, parts: Parts, values: torch.Tensor, counted: torch.Tensor, scalars: np.ndarray,
        step: int,
    ) -> None:  # fmt: skip
        """Sum every row from partial sums, and give the mean over shards to the optimizer. There is a partial sum for each
        position of `plan`; `parts` says of which subtree. `scalars` and `step` are as in `update`."""

    # Rows by their slots, for everything but training.

    def read(self, slots: np.ndarray) -> np.ndarray: ...

    def write(self, slots: np.ndarray, records: np.ndarray) -> None: ...


class Device(Protocol):
    at: torch.device
    by_any_thread = False
    """True if threads other than the one that computes may pool rows."""

    def bank(self, facts: BankFacts) -> BankRows: ...

    def free_bytes(self) -> int: ...

    def empty(self, rows: int, dim: int) -> torch.Tensor: ...


HALVES = (torch.float16, torch.bfloat16)
"""Rows of these are float32 words for stores and checkpoints, used as plain bits, two numbers in each."""


def words(width: int) -> int:
    """Return how many words a record of `width` numbers takes; if `width` is odd, half a word is unused."""
    return (width + 1) // 2


def expanded(records: NDArray[Any], width: int, half: torch.dtype) -> NDArray[np.float32]:
    """Unpack the numbers in some records to float32."""
    bits = torch.from_numpy(np.ascontiguousarray(records).view(np.int16))
    return bits.view(half)[:, :width].to(torch.float32).numpy()


def packed(rows: NDArray[Any], half: torch.dtype) -> NDArray[np.float32]:
    out = torch.zeros((len(rows), 2 * words(rows.shape[1])), dtype=half, device="cpu")
    out[:, : rows.shape[1]] = torch.from_numpy(np.ascontiguousarray(rows)).to(half)
    return out.view(torch.int16).numpy().view(np.float32)


def rounded(need: int, smallest: int) -> int:
    """Round up to the next 4, 5, 6 or 7 times a power of two, and at least to `smallest`."""
    if need <= smallest:
        return smallest
    step = 1 << (need - 1).bit_length() - 3
    return -(-need // step) * step


def torch_device(name: str | torch.device) -> torch.device:
    """Return where the tensors of a device are: for "interpret", which runs the GPU's code in Triton's interpreter, on the
    CPU. Raise if its name is unknown."""
    kind, _, index = str(name).partition(":")
    if str(name) in ("cpu", "interpret"):
        return torch.device("cpu")
    if kind == "cuda" and (index.isdecimal() or str(name) == "cuda"):
        return torch.device(str(name))
    raise ValueError(
        f"device is {str(name)!r}: set it to 'cpu', 'cuda' or 'cuda:N' (or 'interpret', to test the GPU's code without one)"
    )


def open_device(name: str | torch.device, dtype: np.dtype) -> Device:
    from skirl.engine.device.gpu import open_gpu
    from skirl.engine.device.host import Host

    at = torch_device(name)
    return Host(dtype) if str(name) == "cpu" else open_gpu(at, dtype)
