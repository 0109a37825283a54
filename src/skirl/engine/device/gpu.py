"""The cache in a GPU's memory. Rows and plans come and go on separate streams."""

import os
import sys
from typing import Any

import numpy as np
import torch

from skirl.core.ids import BankIds
from skirl.engine.device import BankFacts, BankRows, Device, joined_bags, joined_scales
from skirl.engine.device.transfers import (
    Arrival,
    Block,
    Blocks,
    Departure,
    OnItsWay,
    Packed,
    Streams,
    by_step,
    copy,
    cuda_streams,
    laid_out,
    of_micro,
    plan_of,
)
from skirl.engine.kernels.tree import Gradients, Parts, TreePlan
from skirl.engine.work import Work
from skirl.oracle.step import Step
from skirl.tools.machine import free_bytes

# What has to hold between streams, and what ensures it. All else is ordered by the loop's stream, or by a block's owner.
#
# fetched rows and plan are copied before they are used      the loop's stream waits for the inward event
# a block is not filled again while its rows are in use      the inward stream waits for the event of its last use
# rows that leave are gathered before they are copied out    the outward stream waits for an event of the loop's
# the store gets rows that are there                         the write stage waits for the outward event, on the host,
# a block is not gathered into while it is copied out        and releases the block only then

_TORCH = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}
PLANS_KEPT = 4
"""Free buffers of plans that are kept: as many as there are steps on their way."""
_PIECE = 32 << 20


def open_gpu(at: torch.device, dtype: np.dtype) -> "Gpu":
    if at.type == "cuda":
        if (at.index or 0) >= (count := torch.cuda.device_count()):
            then = "number them from 0" if count else "install torch's CUDA build and a driver"
            raise ValueError(
                f"device is '{at}', and torch {torch.__version__} sees {count or 'no'} GPU: {then}, or set device to 'cpu'"
            )
        at = torch.device("cuda", torch.cuda.current_device() if at.index is None else at.index)
        return Gpu(at, dtype, cuda_streams(at))
    if "triton" not in sys.modules:  # it reads this once, when it is imported
        os.environ["TRITON_INTERPRET"] = "1"
    from skirl.engine.kernels.gpu_math import INTERPRETED

    if not INTERPRETED:
        raise ValueError(
            "device is 'interpret', but Triton was already imported without TRITON_INTERPRET=1: set it before Python starts"
        )
    return Gpu(at, dtype, Streams())


class Gpu(Device):
    def __init__(self, at: torch.device, dtype: np.dtype, streams: Streams) -> None:
        from skirl.engine.kernels import gpu

        self.at = at
        self.streams = streams
        self.kernels: Any = gpu
        self.dtype = _TORCH[dtype]

    def bank(self, facts: BankFacts) -> BankRows:
        return GpuRows(facts, self)

    def free_bytes(self) -> int:
        if self.at.type != "cuda":
            return free_bytes()
        # What torch has reserved but does not use is free for a cache.
        kept = torch.cuda.memory_reserved(self.at) - torch.cuda.memory_allocated(self.at)
        return torch.cuda.mem_get_info(self.at)[0] + kept

    def empty(self, rows: int, dim: int) -> torch.Tensor:
        return torch.empty((rows, dim), dtype=self.dtype, device=self.at)

    def up(self, array: np.ndarray) -> torch.Tensor:
        """Copy a small array to the device, on the current stream. torch keeps the pinned memory until that is done."""
        tensor = torch.from_numpy(np.array(array))  # a copy, since torch takes no read-only arrays
        return tensor if self.at.type != "cuda" else tensor.pin_memory().to(self.at, non_blocking=True)


class GpuRows(BankRows):
    def __init__(self, facts: BankFacts, gpu: Gpu) -> None:
        super().__init__(facts)
        self._gpu, self._streams = gpu, gpu.streams
        self._kernels = gpu.kernels
        self.dtype, self.itemsize = facts.dtype, facts.dtype.itemsize
        self._record_bytes = facts.width * self.itemsize
        self.blocks = Blocks(gpu.at, self._streams.here, most=0)
        self.plans = Blocks(gpu.at, self._streams.here, most=1 << 62, kept=PLANS_KEPT)
        self.cache = torch.empty((0, facts.width), dtype=gpu.dtype, device=gpu.at)
        """The records, in the dtype in which they travel."""
        self.rows = [self.cache for _ in facts.packs]
        """By pack: the same memory from its first column on, in the dtype of its numbers."""
        self._pending: dict[int, Departure] = {}
        self._now: Arrival | None = None
        self._nothing = torch.empty(0, dtype=torch.int32, device=gpu.at)
        self._no_scale = torch.empty(0, dtype=gpu.dtype, device=gpu.at)
        self._filling = [
            [gpu.up(each) if isinstance(each, np.ndarray) else each for each in pack.filling] for pack in facts.packs
        ]

    def allocate(self, slots: int, staging_rows: int) -> "GpuRows":
        self.blocks.most = staging_rows * self._record_bytes
        facts, size = self.facts, slots * self.facts.width
        try:
            words = torch.empty(size + facts.packs[-1].at, dtype=self._gpu.dtype, device=self._gpu.at)
        except torch.OutOfMemoryError as error:
            free = torch.cuda.mem_get_info(self._gpu.at)[0]
            raise MemoryError(
                f"the cache takes {slots * self._record_bytes >> 20:,} MiB, and {free >> 20:,} are free on {self._gpu.at}: "
                f"set cache to a size like '{max(1, free // 2 >> 20)}MiB', or to 'auto', which leaves room for the model"
            ) from error
        self.cache = words[:size].view(slots, facts.width)
        numbers = words.view(facts.half) if facts.half else words
        width = facts.width * (2 if facts.half else 1)
        self.rows = [numbers[pack.at : pack.at + slots * width].view(slots, width) for pack in facts.packs]
        self.shape, self.nbytes = (slots, facts.width), slots * self._record_bytes
        return self

    def forget_moves(self) -> None:
        # Rows that were planned and not used may still arrive, and rows that nobody waited for may still leave.
        for stream in (self._streams.compute, self._streams.inward, self._streams.outward):
            stream.record().synchronize()
        self._pending.clear()
        self._now = None
        self.blocks.reset()
        self.plans.reset()

    # A step's way.

    def arriving(self, work: Work) -> tuple[Arrival, np.ndarray]:
        step, ids = work.steps[self.facts.number], [m.banks[self.facts.number] for m in work.micros]
        rows = self.blocks.take(len(step.fetch_keys) * self._record_bytes)
        order, forwards = by_step(step.forward_step)
        tree = None
        reads = work.reads[self.facts.number] if work.reads else None
        if len(ids) > 1 and reads is None:
            tree = TreePlan.of(step.group_start, step.group_pos, work.parts(self.facts.number))
        packed = Packed(plan_of(step, ids, joined_scales(ids, self.facts.dtype), order, joined_bags(ids), tree, reads))
        plan = self.plans.take(packed.nbytes)
        for block in (rows, plan):
            if block.copied is not None:
                block.copied.synchronize()  # before the host's side is written to; mostly passed long ago
        room = rows.on_host(len(step.fetch_keys), self.facts.width, self.facts.dtype)
        return Arrival(work, rows, plan, packed, forwards, tree), room

    def shipped(self, arrival: Arrival, work: Work) -> None:
        inward = self._streams.inward
        arrival.packed.write(arrival.plan.host.numpy())
        sizes = len(work.steps[self.facts.number].fetch_keys) * self._record_bytes, arrival.packed.nbytes
        for block, nbytes in zip((arrival.rows, arrival.plan), sizes, strict=True):
            if block.used is not None:
                inward.wait(block.used)
            if nbytes:
                inward.run(lambda b=block, n=nbytes: copy(b.device[:n], b.host[:n]))
        arrival.came = arrival.rows.copied = arrival.plan.copied = inward.record()

    def load(self, work: Work, arrival: Arrival) -> Departure:
        streams, compute, facts = self._streams, self._streams.compute, self.facts
        step = work.steps[facts.number]
        streams.begin()
        self._let_go(step)
        count = len(step.evict_keys)
        block = self.blocks.take(count * self._record_bytes)
        assert arrival.came is not None
        compute.wait(arrival.came)
        arrival.views = views = arrival.packed.views(arrival.plan.device)
        pending, kernels, cache = self._pending, self._kernels, self.cache
        gone = block.on_device(count, facts.width, self._gpu.dtype)
        fetched = arrival.rows.on_device(len(step.fetch_keys), facts.width, self._gpu.dtype)
        forwards = []
        for number, lo, hi in arrival.forwards:
            held, rows = pending[number]
            forwards.append((held.on_device(rows, facts.width, self._gpu.dtype), lo, hi))

        def move() -> None:
            kernels.move(cache, views["evict_slots"], gone, None)
            for rows, lo, hi in forwards:
                kernels.move(rows, views["forward_index"][lo:hi], cache, views["forward_slots"][lo:hi])
            kernels.move(fetched, None, cache, views["fetch_slots"])
            for rows, filling in zip(self.rows, self._filling, strict=True):
                kernels.fill(views["new_keys"], views["new_slots"], rows, *filling)

        compute.run(move)
        pending[step.number] = block, count
        self.blocks.retain(block)  # one owner is the write-back, the other a possible forward
        if count:
            streams.outward.wait(compute.record())
            nbytes = count * self._record_bytes
            streams.outward.run(lambda: copy(block.host[:nbytes], block.device[:nbytes]))
            block.copied = streams.outward.record()
        self._release(arrival.rows)
        self._now = arrival
        return block, count

    def landed(self, leaving: Departure) -> np.ndarray:
        block, count = leaving
        assert block.copied is not None
        block.copied.synchronize()
        return block.on_host(count, self.facts.width, self.facts.dtype)

    def written(self, leaving: Departure) -> None:
        self.blocks.release(leaving[0])

    def _let_go(self, step: Step) -> None:
        """Release what only the steps before this one needed."""
        for number in [n for n in self._pending if n < step.hold_from]:
            self._release(self._pending.pop(number)[0])
        if self._now is not None:
            self._release(self._now.plan, self.plans)
            self._now = None

    def _release(self, block: Block, blocks: Blocks | None = None) -> None:
        block.used = self._streams.compute.record()
        (blocks or self.blocks).release(block)

    # Computing.

    def values(self, work: Work) -> torch.Tensor:
        slots, dim = self._current(work).views["slots"], self.columns(work).dim
        self._streams.begin()
        out = self._gpu.empty(len(slots), dim)
        arguments = self.rows[work.pack], dim, slots, self._nothing, 1, self._no_scale, out
        self._streams.compute.now(lambda: self._kernels.pool(*arguments))
        return out

    def pool(self, work: Work, micro: int) -> torch.Tensor:
        arrival, number = self._current(work), self.facts.number
        ids, at, views = work.micros[micro].banks[number], work.positions(number, micro), arrival.views
        self._streams.begin()
        scale = views["scale"][at] if len(ids.scale) else self._no_scale
        out = self._gpu.empty(ids.bags, self.columns(work).dim)
        rows, places = self.rows[work.pack], views["slots"]
        if work.reads:
            rows, places = work.values[number], views["place"]
        self._streams.compute.now(lambda: self._pool(rows, places[at], ids, of_micro(views, micro), scale, out))
        return out

    def pool_rows(self, rows: np.ndarray, dim: int, ids: BankIds, place: np.ndarray) -> torch.Tensor:
        self._streams.begin()
        out = self._gpu.empty(ids.bags, dim)

        def pool() -> None:
            up = self._gpu.up
            scale = up(ids.scale) if len(ids.scale) else self._no_scale
            laid = {name: up(array) for name, array in laid_out(ids).items()}
            self._pool(up(rows), up(place), ids, laid, scale, out)

        self._streams.compute.now(pool)
        return out

    def fold(self, ids: BankIds, grad: torch.Tensor | None, into: torch.Tensor) -> None:
        self._streams.begin()  # autograd's thread has the stream of the forward
        if grad is None:
            self._streams.compute.now(into.zero_)
            return
        assert self._now is not None
        mine = [m.banks[self.facts.number].bag is ids.bag for m in self._now.work.micros]
        laid = of_micro(self._now.views, mine.index(True))
        # A bag's gradient is a sum of rows, as the bag itself is.
        arguments = grad, grad.shape[1], laid["fold"], laid["fold_begin"], 1, self._no_scale, into
        self._streams.compute.now(lambda: self._kernels.pool(*arguments))

    def _pool(
        self, rows: torch.Tensor, places: torch.Tensor, ids: BankIds, laid: dict[str, torch.Tensor],
        scale: torch.Tensor, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Pool plain features and shared bags, and copy the latter to their samples."""
        if not ids.shares:
            offsets = laid.get("offsets", self._nothing)
            self._kernels.pool(rows, out.shape[1], places, offsets, self.facts.features, scale, out)
            return
        self._kernels.pool(rows, out.shape[1], places, laid["begin"], 1, scale, out, laid["end"])
        self._kernels.move(out[ids.samples :], laid["copy"], out[: ids.samples], laid["copy_to"])

    # The backward and the update. Work on a stream may run later, so it holds all that it needs.

    def update(self, work: Work, scalars: np.ndarray, step: int) -> None:
        if len(work.micros) > 1:
            self._apply_sums(work, *self.sums(work), scalars, step)
            return
        views, gpu, grads = self._current(work).views, self._gpu, work.gradient(self.facts.number)
        mask = work.live_rows(self.facts.number)

        def apply() -> None:
            live = self._nothing if mask.all() else self._gpu.up(mask)
            starts = views["group_start"], views["group_pos"]
            gradients = Gradients(*starts, views["bag_of"], views["scale"], grads, live)
            stretches = views["stretches"]
            m = len(stretches)
            marks = torch.empty(m + len(views["rows"]) if m else 0, dtype=torch.int32, device=gpu.at)
            scratch = stretches, gpu.empty(m, grads.shape[1]), marks
            self._apply(work, views, gradients, scalars, step, scratch)

        self._streams.begin()  # autograd's thread has the stream of the forward
        self._streams.compute.run(apply)

    def sums(self, work: Work, block: range | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        bank = self.facts.number
        arrival, grads, mask = self._current(work), work.gradient(bank), work.live_rows(bank)
        views = arrival.views
        tree = sent = None if block is not None else arrival.tree
        if tree is None:
            parts = work.parts(bank)
            tree = TreePlan.of(*work.groups(bank), parts if block is None else parts.within(block))
        starts = ("read_start", "read_pos") if work.reads else ("group_start", "group_pos")

        def sums() -> tuple[torch.Tensor, torch.Tensor]:
            live = self._nothing if mask.all() else self._gpu.up(mask)
            start, pos = (views[name] for name in starts)
            given = Gradients(start, pos, views["bag_of"], views["scale"], grads, live)
            return self._summed(given, tree, None if sent is None else views)

        self._streams.begin()
        return self._streams.compute.now(sums)

    def apply(
        self, work: Work, plan: Step, parts: Parts, values: torch.Tensor, counted: torch.Tensor, scalars: np.ndarray,
        step: int,
    ) -> None:  # fmt: skip
        arrival, tree = self._current(work), TreePlan.of(plan.group_start, plan.group_pos, parts)

        def sums() -> tuple[torch.Tensor, torch.Tensor]:
            each = torch.arange(len(values), dtype=torch.int32, device=self._gpu.at)
            if plan is arrival.work.steps[self.facts.number]:
                starts = arrival.views["group_start"], arrival.views["group_pos"]
            else:
                starts = self._gpu.up(plan.group_start), self._gpu.up(plan.group_pos)
            given = Gradients(*starts, each, self._no_scale, values, counted)
            return self._summed(given, tree)

        self._streams.begin()
        self._apply_sums(work, *self._streams.compute.now(sums), scalars, step)

    def _apply_sums(
        self, work: Work, values: torch.Tensor, counted: torch.Tensor, scalars: np.ndarray, step: int
    ) -> None:
        rows, times, views, at = len(values), 1 / work.shards, self._current(work).views, self._gpu.at

        def apply() -> None:
            # The sums are applied as the gradients of rows with one position each.
            each = torch.arange(rows + 1, dtype=torch.int32, device=at)
            scale = self._no_scale if times == 1 else torch.full((rows,), times, dtype=self._gpu.dtype, device=at)
            given = Gradients(each, each[:-1], each[:-1], scale, values, counted)
            none = self._nothing.view(0, 3), self._gpu.empty(0, values.shape[1]), self._nothing
            self._apply(work, views, given, scalars, step, none)

        self._streams.begin()
        self._streams.compute.run(apply)

    def _summed(
        self, gradients: Gradients[torch.Tensor], tree: TreePlan, views: dict[str, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`views`: those of an arrival, if the tree came with it."""
        up = self._gpu.up
        stretches, runs = (views["stretches"], views["runs"]) if views else (up(tree.stretches), up(tree.runs))
        m, rows = len(stretches), len(gradients.start) - 1
        partial = self._gpu.empty(m, gradients.grads.shape[1])
        marks = torch.empty(m + rows, dtype=torch.int32, device=self._gpu.at)
        self._kernels.sums(gradients, stretches, runs, tree.rounds, partial, marks)
        return partial[:rows], marks[:rows] > 0

    def _apply(
        self, work: Work, views: dict[str, torch.Tensor], gradients: Gradients[torch.Tensor], scalars: np.ndarray,
        step: int, scratch: tuple[torch.Tensor, ...],
    ) -> None:  # fmt: skip
        pack = self.columns(work)
        self._kernels.update(
            self.rows[work.pack], pack.dim, pack.rule, views["rows"], views["keys"], gradients, self._gpu.up(scalars),
            pack.clips, *scratch, rounding=(pack.seed, step) if self.facts.half else None,
        )  # fmt: skip

    def _current(self, work: Work) -> Arrival:
        assert self._now is not None and self._now.work.number == work.number, "rows of another step are in place"
        return self._now

    # Rows by their slots.

    def read(self, slots: np.ndarray) -> np.ndarray:
        out = np.empty((len(slots), self.facts.width), self.facts.dtype)
        each = max(1, _PIECE // self._record_bytes)
        for lo in range(0, len(slots), each):
            part = slots[lo : lo + each].astype(np.int32)
            out[lo : lo + each] = self._streams.compute.now(lambda p=part: self._gathered(p).cpu().numpy())
        return out

    def write(self, slots: np.ndarray, records: np.ndarray) -> None:
        up = self._gpu.up
        part = slots.astype(np.int32)
        self._streams.compute.now(lambda: self._kernels.move(up(records), None, self.cache, up(part)))

    def copy(self, places: np.ndarray) -> OnItsWay:
        """Return records of some slots, as they will be after all work that is now on the loop's stream."""
        compute, outward = self._streams.compute, self._streams.outward
        rows, gathered = compute.now(lambda: (self._gathered(places), self._streams.here()))
        compute.wait(gathered)  # the loop may have moved to another stream, while this thread gathered on its last one
        host = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=rows.device.type == "cuda")
        outward.wait(gathered)
        outward.run(lambda: copy(host, rows))
        outward.keep(rows)
        return OnItsWay(host, rows, outward.record())

    def _gathered(self, slots: np.ndarray) -> torch.Tensor:
        out = self._gpu.empty(len(slots), self.facts.width)
        self._kernels.move(self.cache, self._gpu.up(slots), out, None)
        return out
