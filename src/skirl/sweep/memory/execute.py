"""A schedule as it runs: operators of graphs, and storages that leave the device and come back over its link."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map_only

from skirl.sweep.memory.capture import Captured
from skirl.sweep.memory.schedule import Schedule
from skirl.sweep.memory.simulate import Step


class Link(Protocol):
    """What moves bytes between the device and the host."""

    rate: float
    """Bytes a second, each way."""
    stall: float
    """Seconds for which somebody has waited."""

    def offload(self, data: Tensor) -> Any:
        """Begin to copy to the host."""
        ...

    def reload(self, copied: Tensor, device: torch.device) -> Any:
        """Begin to copy back, into new memory."""
        ...

    def wait(self, moving: Any) -> Tensor:
        """Wait for the copy, and return it."""
        ...


class EmulatedLink:
    """A link for a machine without one: copies are made at once, and are waited for as long as the link would take."""

    def __init__(
        self, rate: float, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.rate, self.stall = rate, 0.0
        self._clock, self._sleep = clock, sleep
        self._free = {"out": 0.0, "in": 0.0}

    def offload(self, data: Tensor) -> Any:
        return self._copied(data, "out")

    def reload(self, copied: Tensor, device: torch.device) -> Any:
        return self._copied(copied, "in")

    def wait(self, moving: tuple[Tensor, float]) -> Tensor:
        data, until = moving
        if (left := until - self._clock()) > 0:
            self.stall += left
            self._sleep(left)
        return data

    def _copied(self, data: Tensor, way: str) -> tuple[Tensor, float]:
        self._free[way] = max(self._clock(), self._free[way]) + data.nbytes / self.rate
        return data.clone(), self._free[way]


class DeviceLink:
    """The link of an accelerator, by torch's operators: pinned memory, a stream and events. No GPU has run it yet."""

    stall = 0.0  # the device waits, not the host

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def offload(self, data: Tensor) -> Any:
        return torch.ops.ao.offload(data), data

    def reload(self, copied: Tensor, device: torch.device) -> Any:
        return torch.ops.ao.reload(copied, device), copied

    def wait(self, moving: tuple[Tensor, Tensor]) -> Tensor:
        return torch.ops.ao.wait_tensor(*moving)


@dataclass(frozen=True)
class Pack:
    """A pack's graph, and what is around it."""

    captured: Captured
    enter: Callable[[], Sequence[Tensor]]
    """Returns the graph's inputs. Rows' outputs are held from then on."""
    leave: Callable[[Sequence[Tensor | None]], None]
    """Takes the graph's outputs."""
    drawing: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Stands around operators that draw random numbers."""

    def for_times(self) -> "Pack":
        """Return a pack that trains nothing: it runs on the same inputs, and on copies of what a graph may write to."""
        weights = len(self.captured.weights)

        def enter() -> list[Tensor]:
            given = enumerate(self.enter())
            return [w.clone() if at < weights and not isinstance(w, nn.Parameter) else w for at, w in given]

        return Pack(self.captured, enter, lambda outputs: None)


class Executor:
    """Runs schedules that have been checked.

    - `measures`: whether to sum up, in each operator, the bytes of all storages that are held: `peak` is the largest sum.
    - `times`: a list for the seconds of each operator's runs, by name; None: they are not taken.
    """

    def __init__(self, link: Link, *, measures: bool = False, times: dict[str, list[float]] | None = None) -> None:
        self.link, self.measures, self.times, self.peak = link, measures, times, 0

    @torch.no_grad()
    def run(self, schedule: Schedule, packs: Sequence[Pack]) -> None:
        running = [_Running(pack, step, self.link) for pack, step in zip(packs, schedule.steps, strict=True)]
        for kind, number, what in schedule.actions:
            one = running[number]
            if kind == "run":
                began = time.perf_counter()
                one.run(what)
                if self.times is not None:
                    one.synchronize()
                    self.times.setdefault(what, []).append(time.perf_counter() - began)
                if self.measures:
                    held = {each._cdata: each.nbytes() for other in running for each in other.held()}
                    self.peak = max(self.peak, sum(held.values()))
            elif kind == "enter":
                one.inputs = dict(zip(one.places, packs[number].enter(), strict=True))
            elif kind == "leave":
                results = one.results()
                one.values, one.storages, one.inputs = {}, {}, {}
                packs[number].leave(results)
                del results
            else:
                getattr(one, kind if kind != "await" else "come_back")(what)


class _Running:
    """A pack while its schedule runs."""

    def __init__(self, pack: Pack, step: Step, link: Link) -> None:
        self.pack, self.step, self.link = pack, step, link
        graph = pack.captured.graph.graph
        self.nodes = {node.name: node for node in graph.nodes}
        self.places = [node.name for node in graph.nodes if node.op == "placeholder"]
        self.inputs = dict[str, Tensor]()
        self.values = dict[str, Any]()
        """The results of operators that are held."""
        self.storages = dict[str, torch.UntypedStorage]()
        self.leaving, self.coming = dict[str, Any](), dict[str, Any]()
        self.away = dict[str, Tensor]()

    def run(self, name: str) -> None:
        node, operator = self.nodes[name], self.step.operators[name]
        found = lambda of: self.values[of.name] if of.op == "call_function" else self.inputs[of.name]  # noqa: E731
        with self.pack.drawing() if operator.draws else nullcontext():
            self.values[name] = node.target(*map_arg(node.args, found), **map_arg(node.kwargs, found))
        if operator.makes:
            made = list(_storages(self.values[name]).values())
            self.storages |= {storage: made[int(storage.rpartition(".")[2])] for storage in operator.makes}

    def results(self) -> list[Tensor | None]:
        outputs = cast(Sequence[Any], self.nodes["output"].args[0])
        return [self.values[each.name] if isinstance(each, fx.Node) else each for each in outputs]

    def free(self, storage: str) -> None:
        del self.storages[storage]
        for name in self.step.aliases[storage]:
            self.values.pop(name, None)

    def offload(self, storage: str) -> None:
        self.leaving[storage] = self.link.offload(_bytes(self.storages[storage]))

    def release(self, storage: str) -> None:
        old = self.storages.pop(storage)
        self.away[storage] = self.link.wait(self.leaving.pop(storage))
        self._replace(storage, Tensor, lambda value: _Away.of(value) if _address(value) == old._cdata else value)

    def reload(self, storage: str) -> None:
        self.coming[storage] = self.link.reload(self.away.pop(storage), next(iter(self.inputs.values())).device)

    def come_back(self, storage: str) -> None:
        new = self.storages[storage] = self.link.wait(self.coming.pop(storage)).untyped_storage()
        self._replace(storage, _Away, lambda value: value.over(new))

    def _replace(self, storage: str, kind: type, by: Callable[[Any], Any]) -> None:
        for name in self.step.aliases[storage]:
            if name in self.values:
                self.values[name] = tree_map_only(kind, by, self.values[name])

    def held(self) -> Iterator[torch.UntypedStorage]:
        """Yield what counts as held: results, rows' outputs, and what is coming back; but not views of other inputs."""
        rows = set(self.pack.captured.rows)
        others = _storages([value for name, value in self.inputs.items() if name not in rows])
        everything = _storages([self.values, self.coming, [self.inputs[name] for name in rows & {*self.inputs}]])
        yield from (storage for address, storage in everything.items() if address not in others)

    def synchronize(self) -> None:
        if next(iter(self.inputs.values())).device.type != "cpu":
            torch.accelerator.synchronize()


@dataclass(frozen=True)
class _Away:
    """A tensor whose storage is on the host."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, value: Tensor) -> "_Away":
        return cls(value.dtype, int(value.storage_offset()), value.shape, value.stride())

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)  # pyright: ignore[reportArgumentType]


def _address(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _storages(result: Any) -> dict[int, torch.UntypedStorage]:
    tensors = [value.untyped_storage() for value in tree_leaves(result) if isinstance(value, Tensor)]
    return {storage._cdata: storage for storage in tensors}


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]
