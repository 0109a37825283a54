"""A schedule as it runs: operators of graphs, and storages that go to the host and back over the device's link."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map_only

from skirl.sweep.memory.capture import Captured
from skirl.sweep.memory.schedule import Schedule
from skirl.sweep.memory.simulate import Step

Storage = torch.UntypedStorage


class EmulatedLink:
    """A link for a machine without one: copies are made at once, and waited for as long as the link would take.

    - `rate`: bytes a second, each way.
    - `clock`, `sleep`: as those of `time`, which are the defaults.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.perf_counter, sleep: Any = time.sleep) -> None:
        self.rate, self._clock, self._sleep = rate, clock, sleep
        self._free = [0.0, 0.0]
        self.stall = 0.0
        """Seconds for which operators have waited."""

    def offload(self, data: Tensor, way: int = 0) -> Any:
        """Begin to copy bytes to the host."""
        self._free[way] = max(self._clock(), self._free[way]) + data.nbytes / self.rate
        return data.clone(), self._free[way]

    def reload(self, copied: Tensor, device: torch.device) -> Any:
        """Begin to copy them back, into new memory."""
        return self.offload(copied, 1)

    def wait(self, moving: tuple[Tensor, Any]) -> Tensor:
        """Wait for either, and return the copy."""
        if (left := moving[1] - self._clock()) > 0:
            self.stall += left
            self._sleep(left)
        return moving[0]


class DeviceLink(EmulatedLink):
    """A GPU's own link, by torch's operators: pinned memory, a stream, events. The GPU waits, and not the host, so `stall`
    stays 0. No GPU has run it yet."""

    def offload(self, data: Tensor, way: int = 0) -> Any:
        return torch.ops.ao.offload(data), data

    def reload(self, copied: Tensor, device: torch.device) -> Any:
        return torch.ops.ao.reload(copied, device), copied

    def wait(self, moving: tuple[Tensor, Any]) -> Tensor:
        return torch.ops.ao.wait_tensor(*moving)


@dataclass
class Pack:
    """A pack's graph, and what is around it."""

    captured: Captured
    enter: Callable[[], Sequence[Tensor]]
    """Returns the graph's inputs. Rows' outputs are held from then on."""
    leave: Callable[[Sequence[Any]], None]
    """Takes the graph's outputs."""
    drawing: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Stands around operators that draw random numbers."""
    times: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each operator's runs, while its step has none."""


@torch.no_grad()
def execute(schedule: Schedule, packs: Sequence[Pack], link: EmulatedLink, *, measures: bool = False) -> int:
    """Run a schedule that has been checked. Return the most bytes that were held in an operator, if it measures."""
    running, peak = [_Running(*each, link) for each in zip(packs, schedule.steps, strict=True)], 0
    for kind, pack, what in schedule.actions:
        getattr(running[pack], kind)(what)
        if measures and kind == "run":
            held = {storage._cdata: storage.nbytes() for each in running for storage in each.held()}
            peak = max(peak, sum(held.values()))
    return peak


class _Running:
    """A pack while its schedule runs, with a method for each kind of action."""

    def __init__(self, pack: Pack, step: Step, link: EmulatedLink) -> None:
        self.pack, self.step, self.link = pack, step, link
        self.nodes = {node.name: node for node in pack.captured.graph.graph.nodes}
        self.results, self.inputs = dict[str, Any](), dict[str, Tensor]()
        self.storages, self.away = dict[str, Storage](), dict[str, Tensor]()
        self.leaving, self.coming = dict[str, Any](), dict[str, Any]()

    def enter(self, _: str) -> None:
        names = [name for name, node in self.nodes.items() if node.op == "placeholder"]
        self.inputs = dict(zip(names, self.pack.enter(), strict=True))
        self.device = self.inputs[names[0]].device

    def run(self, name: str) -> None:
        def found(of: fx.Node) -> Any:
            return self.results[of.name] if of.op == "call_function" else self.inputs[of.name]

        node, operator, began = self.nodes[name], self.step.operators[name], time.perf_counter()
        with self.pack.drawing() if operator.draws else nullcontext():
            self.results[name] = node.target(*map_arg(node.args, found), **map_arg(node.kwargs, found))
        if not self.step.seconds:
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            self.pack.times.setdefault(name, []).append(time.perf_counter() - began)
        if operator.makes:
            made = [*_storages(self.results[name]).values()]
            self.storages |= {storage: made[int(storage.rpartition(".")[2])] for storage in operator.makes}

    def free(self, storage: str) -> None:
        del self.storages[storage]
        for name in self.step.aliases[storage]:
            self.results.pop(name, None)

    def offload(self, storage: str) -> None:
        self.leaving[storage] = self.link.offload(_over(torch.uint8, 0, None, None, self.storages[storage]))

    def release(self, storage: str) -> None:
        def away(value: Tensor) -> Any:
            if value.untyped_storage()._cdata != old._cdata:
                return value
            return partial(_over, value.dtype, int(value.storage_offset()), value.shape, value.stride())

        old = self.storages.pop(storage)
        self.away[storage] = self.link.wait(self.leaving.pop(storage))
        self._replace(storage, Tensor, away)

    def reload(self, storage: str) -> None:
        self.coming[storage] = self.link.reload(self.away.pop(storage), self.device)

    def back(self, storage: str) -> None:
        new = self.storages[storage] = self.link.wait(self.coming.pop(storage)).untyped_storage()
        self._replace(storage, partial, lambda over: over(new))

    def leave(self, _: str) -> None:
        outputs: Any = self.nodes["output"].args[0]
        results = [self.results[each.name] if isinstance(each, fx.Node) else each for each in outputs]
        self.results, self.inputs, self.storages = {}, {}, {}
        self.pack.leave(results)

    def _replace(self, storage: str, kind: type, by: Callable[[Any], Any]) -> None:
        for name in self.step.aliases[storage]:
            if name in self.results:
                self.results[name] = tree_map_only(kind, by, self.results[name])

    def held(self) -> Iterator[Storage]:
        """Yield what counts as held: results, rows' outputs and what comes back, but not views of other inputs."""
        rows = {name: value for name, value in self.inputs.items() if name in self.pack.captured.rows}
        others = _storages([value for name, value in self.inputs.items() if name not in rows])
        everything = _storages([self.results, self.coming, rows])
        yield from (storage for address, storage in everything.items() if address not in others)


def _storages(values: Any) -> dict[int, Storage]:
    found = [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor)]
    return {storage._cdata: storage for storage in found}


def _over(dtype: torch.dtype, offset: int, shape: Any, stride: Any, storage: Storage) -> Tensor:
    """Return a tensor over a storage, of all its bytes without a shape."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage) if shape is None else empty.set_(storage, offset, shape, stride)
