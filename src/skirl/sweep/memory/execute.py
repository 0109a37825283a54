"""A schedule as it runs: operators of graphs, and storages that leave the device and come back over its link."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from skirl.sweep.memory.capture import Captured
from skirl.sweep.memory.schedule import Schedule


class Link(Protocol):
    """Moves bytes between the device and the host."""

    rate: float
    """Bytes a second, each way."""

    def offload(self, data: Tensor) -> Any:
        """Begin to copy bytes to the host."""
        ...

    def reload(self, copied: Any, device: torch.device) -> Any:
        """Begin to copy them back, into new memory, once they have left."""
        ...

    def wait(self, moving: Any) -> Tensor:
        """Wait for either, and return the bytes."""
        ...


class EmulatedLink:
    """A link on a machine that has none: copies that are there at once and count as moving for as long as they would."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rate, self._clock = rate, clock
        self._free = [0.0, 0.0]
        self.stall = 0.0

    def _moved(self, data: Tensor, way: int) -> tuple[Tensor, float]:
        self._free[way] = max(self._clock(), self._free[way]) + data.nbytes / self.rate
        return data.clone(), self._free[way]

    def offload(self, data: Tensor) -> Any:
        return self._moved(data, 0)

    def reload(self, copied: Tensor, device: torch.device) -> Any:
        return self._moved(copied, 1)

    def wait(self, moving: tuple[Tensor, float]) -> Tensor:
        data, until = moving
        while (left := until - self._clock()) > 0:
            self.stall += left
            time.sleep(left)
        return data


class DeviceLink:
    """The link of a GPU, by torch's own operators: pinned memory, a stream and events. Not proven: no GPU has run it."""

    stall = 0.0

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def offload(self, data: Tensor) -> Any:
        return torch.ops.ao.offload(data), data

    def reload(self, copied: Tensor, device: torch.device) -> Any:
        return torch.ops.ao.reload(copied, device), copied

    def wait(self, moving: tuple[Tensor, Tensor]) -> Tensor:
        return torch.ops.ao.wait_tensor(*moving)


@dataclass
class Pack:
    """One pack of a schedule: what brings its inputs, takes its outputs, and stands around random numbers."""

    captured: Captured
    enter: Callable[[], Sequence[Tensor]]
    """Returns the graph's inputs. What they hold besides them is freed at the end of `leave`."""
    leave: Callable[[Sequence[Tensor | None]], None]
    drawing: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass
class Executor:
    """Runs schedules."""

    link: Any
    measures: bool = False
    """Whether to sum up what storages hold behind each operator."""
    peak: int = 0
    """The most bytes that were held, if it measures."""
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @torch.no_grad()
    def run(self, schedule: Schedule, packs: Sequence[Pack]) -> None:
        values: list[dict[str, Any]] = [{} for _ in packs]
        inputs: list[dict[str, Any]] = [{} for _ in packs]
        moving: dict[tuple[int, str], Any] = {}
        nodes = [{node.name: node for node in pack.captured.graph.graph.nodes} for pack in packs]
        for kind, number, what in schedule.actions:
            pack, own, step = packs[number], values[number], schedule.steps[number]
            if kind == "run":
                node, given = nodes[number][what], inputs[number]

                def found(of: fx.Node, own: Mapping[str, Any] = own, given: Mapping[str, Any] = given) -> Any:
                    return own[of.name] if of.name in own else given[of.name]

                operator = step.operators[what]
                with pack.drawing() if operator.draws else nullcontext():
                    own[what] = node.target(*map_arg(node.args, found), **map_arg(node.kwargs, found))
                if self.measures:
                    self._measure(values, inputs, packs)
            elif kind == "enter":
                names = (node.name for node in pack.captured.graph.graph.nodes if node.op == "placeholder")
                inputs[number] = dict(zip(names, pack.enter(), strict=True))
            elif kind == "leave":
                of_outputs = pack.captured.graph.graph.output_node().args[0]
                outputs = [own[each.name] if isinstance(each, fx.Node) else each for each in of_outputs]
                own.clear()
                inputs[number] = {}
                pack.leave(outputs)
                del outputs
            elif kind == "free":
                for name in _users(step, what):
                    own.pop(name, None)
            elif kind == "offload":
                moving[number, what] = self.link.offload(_bytes(_storage(own, step, what)))
            elif kind == "reload":
                moving[number, what] = self.link.reload(moving[number, what], device)
