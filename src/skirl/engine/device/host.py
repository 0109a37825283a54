"""The cache in host memory: everything happens at once, in the thread that asks for it. Tensors are in memory that is
reused: a buffer comes back with its last user."""

import weakref
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import DTypeLike

from skirl.core.ids import BankIds
from skirl.core.initial import fill
from skirl.engine import kernels
from skirl.engine.device import BankFacts, BankRows, Device, joined_bags, joined_scales, rounded
from skirl.engine.kernels import cpu
from skirl.engine.kernels.tree import Gradients, Parts
from skirl.engine.work import Work
from skirl.oracle.step import Step
from skirl.store.base import Rows
from skirl.tools.machine import free_bytes
from skirl.tools.threads import run

ALIGNED = 64
KEPT = 2
"""Most free buffers that are kept: one for the output, and one for its gradient or for the loss that a loop keeps; or one
for rows that come to the cache, and one for those that leave it."""
SMALLEST = 1024


def empty(size: int, dtype: DTypeLike) -> np.ndarray:
    """Return an array of `size` numbers that begins on a cache line. Its contents are undefined. NumPy asks for large pages,
    which torch does not."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNED // itemsize, dtype)
    skip = -raw.ctypes.data % ALIGNED // itemsize
    return raw[skip : skip + size]


class Reused:
    """Gives out tensors with undefined contents. A buffer is free when the last tensor that uses it is gone, including
    views and graphs."""

    def __init__(self, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._free: list[np.ndarray] = []

    def take(self, rows: int, dim: int) -> torch.Tensor:
        """Return a tensor in a free buffer of at most twice the size, or in a new one."""
        need = rows * dim
        if not need:
            return torch.from_numpy(np.empty((rows, dim), self._dtype))
        buffer = self._fitting(need)
        buffer = empty(rounded(need, SMALLEST), self._dtype) if buffer is None else buffer
        array = buffer[:need].reshape(rows, dim)
        # torch keeps this object for as long as any tensor needs its memory.
        weakref.finalize(array, _give_back, self._free, buffer).atexit = False
        return torch.from_numpy(array)

    def _fitting(self, need: int) -> np.ndarray | None:
        """Return the free buffer that fits and was used last, or None. Any thread may give one back meanwhile, so this
        uses only a list's own methods, which are atomic."""
        passed: list[np.ndarray] = []
        try:
            while self._free:
                buffer = self._free.pop()
                if need <= len(buffer) <= 2 * max(need, SMALLEST):
                    return buffer
                passed.append(buffer)
        except IndexError:  # another thread took the last one
            pass
        finally:
            self._free.extend(reversed(passed))
        return None


def _give_back(free: list[np.ndarray], buffer: np.ndarray) -> None:
    free.append(buffer)
    if len(free) > KEPT:
        del free[:1]  # the one unused for longest


class Host(Device):
    at = torch.device("cpu")
    by_any_thread = True

    def __init__(self, dtype: np.dtype) -> None:
        self._buffers = Reused(dtype)

    def bank(self, facts: BankFacts) -> BankRows:
        return HostRows(facts, self._buffers)

    def free_bytes(self) -> int:
        return free_bytes()

    def empty(self, rows: int, dim: int) -> torch.Tensor:
        return self._buffers.take(rows, dim)


class HostRows(BankRows):
    """One bank in host memory. Both an arrival and the rows that leave are records; the store reads into the former."""

    def __init__(self, facts: BankFacts, buffers: Reused) -> None:
        super().__init__(facts)
        self.array = np.empty((0, facts.width), facts.dtype)
        self._packs = [self.array for _ in facts.packs]
        """By pack: the records, from its first column on."""
        self._staging = Reused(facts.dtype)
        self._buffers = buffers
        self._pending: dict[int, torch.Tensor] = {}
        """By step: rows that left, as long as they may be forwarded."""

    def allocate(self, slots: int, staging_rows: int) -> Rows:
        # The array begins on a cache line. Pages are backed when first written.
        width, packs = self.facts.width, self.facts.packs
        numbers = empty(slots * width + packs[-1].at, self.facts.dtype)
        self._packs = [numbers[pack.at : pack.at + slots * width].reshape(slots, width) for pack in packs]
        self.array = self._packs[0]
        return self.array

    def forget_moves(self) -> None:
        self._pending.clear()

    def arriving(self, work: Work) -> tuple[torch.Tensor, np.ndarray]:
        arrival = self._staging.take(len(work.steps[self.facts.number].fetch_keys), self.facts.width)
        return arrival, arrival.numpy()

    def load(self, work: Work, arrival: torch.Tensor) -> torch.Tensor:
        step, pending = work.steps[self.facts.number], self._pending
        for number in [n for n in pending if n < step.hold_from]:
            del pending[number]
        leaving = self._staging.take(len(step.evict_keys), self.facts.width)
        self._run(cpu.take, len(leaving), self.array, step.evict_slots, leaving.numpy())
        pending[step.number] = leaving
        for number in np.unique(step.forward_step):
            which = step.forward_step == number
            rows = pending[int(number)].numpy()[step.forward_index[which]]
            cpu.put(self.array, step.forward_slots[which], rows, 0, len(rows))
        self._run(cpu.put, len(arrival), self.array, step.fetch_slots, arrival.numpy())
        for pack, rows in zip(self.facts.packs, self._packs, strict=True):
            self._run(fill, len(step.new_keys), step.new_keys, step.new_slots, rows, pack.first, *pack.filling)
        return leaving

    def landed(self, leaving: torch.Tensor) -> np.ndarray:
        return leaving.numpy()

    def pool(self, work: Work, micro: int) -> torch.Tensor:
        bank = self.facts.number
        place = work.place(bank)[work.positions(bank, micro)]
        rows = work.values[bank].numpy() if work.reads else self._packs[work.pack]  # what places refer to
        return self.pool_rows(rows, self.columns(work).dim, work.micros[micro].banks[bank], place)

    def pool_rows(self, rows: np.ndarray, dim: int, ids: BankIds, place: np.ndarray) -> torch.Tensor:
        out = self._buffers.take(ids.bags, dim)
        into, features = out, self.facts.features
        begins, ends = (ids.offsets[:0], ids.offsets[:0]) if ids.one_each else (ids.offsets, ids.offsets[1:])
        if ids.shares:
            first = 0 if len(ids.columns) < ids.features else ids.samples  # rows that are copied below need no zeros
            into, features, (begins, ends) = out[first:], 1, ids.of_rows[:, first:]
        kernel = kernels.pool_for(dim, rows.shape[1], self.facts.dtype, not len(begins))
        self._run(kernel, len(into), rows, dim, place, begins, ends, features, ids.scale, into.numpy())
        if ids.shares:
            samples, bags = out[: ids.samples].numpy(), out[ids.samples :].numpy()
            self._run(cpu.expand, ids.batch, bags, ids.bag, ids.columns, ids.features, samples)
        return out

    def fold(self, ids: BankIds, grad: torch.Tensor | None, into: torch.Tensor) -> None:
        if grad is None:
            into.zero_()
            return
        bags = into.numpy()
        self._run(cpu.fold, len(bags), grad.numpy(), ids.bag, ids.columns, ids.features, bags)

    def update(self, work: Work, scalars: np.ndarray, step: int) -> None:
        bank = self.facts.number
        self._update(work, self._gradients(work), work.parts(bank), scalars)

    def _update(self, work: Work, gradients: Gradients, parts: Parts, scalars: np.ndarray) -> None:
        pack, step = self.columns(work), work.steps[self.facts.number]
        kernel = kernels.update_for(pack.dim, self.facts.dtype, pack.rule, len(parts.ends) == 1)
        rows, parts = self._packs[work.pack], parts._replace(times=1 / work.shards)
        given = rows, pack.dim, step.rows, step.keys, gradients, parts, scalars
        self._run(kernel, len(step.rows), *given, work=gradients.start)

    def values(self, work: Work) -> torch.Tensor:
        slots = work.steps[self.facts.number].slots
        rows, dim, none = self._packs[work.pack], self.columns(work).dim, slots[:0]
        out = self._buffers.take(len(slots), dim)
        kernel = kernels.pool_for(dim, rows.shape[1], self.facts.dtype, True)
        self._run(kernel, len(out), rows, dim, slots, none, none, 1, np.empty(0, self.facts.dtype), out.numpy())
        return out

    def sums(self, work: Work, block: range | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        parts, gradients = work.parts(self.facts.number), self._gradients(work)
        rows, dim, none = len(gradients.start) - 1, gradients.grads.shape[1], np.empty(0, np.int64)
        values, counted = self._buffers.take(rows, dim), np.empty(rows, np.bool_)
        given = values.numpy(), dim, counted, none, gradients, parts if block is None else parts.within(block), none
        kernel = kernels.update_for(dim, self.facts.dtype, None, False)
        self._run(kernel, rows, *given, work=gradients.start)
        return values, torch.from_numpy(counted)

    def _gradients(self, work: Work) -> Gradients:
        bank = self.facts.number
        ids, grads = [m.banks[bank] for m in work.micros], work.gradient(bank).numpy()
        scale = joined_scales(ids, self.facts.dtype)
        return Gradients(*work.groups(bank), joined_bags(ids), scale, grads, work.live_rows(bank))

    def apply(
        self, work: Work, plan: Step, parts: Parts, values: torch.Tensor, counted: torch.Tensor, scalars: np.ndarray,
        step: int,
    ) -> None:  # fmt: skip
        each, none = np.arange(len(values), dtype=np.int32), np.empty(0, self.facts.dtype)
        given = Gradients(plan.group_start, plan.group_pos, each, none, values.numpy(), counted.numpy())
        self._update(work, given, parts, scalars)

    def read(self, slots: np.ndarray) -> np.ndarray:
        out = np.empty((len(slots), self.facts.width), self.facts.dtype)
        self._run(cpu.take, len(out), self.array, slots, out)
        return out

    def write(self, slots: np.ndarray, records: np.ndarray) -> None:
        self.array[slots] = records

    def _run(self, kernel: Callable[..., None], n: int, *args: object, work: np.ndarray | None = None) -> None:
        run(kernel, n, *args, threads=torch.get_num_threads(), work=work)
