"""A schedule as it runs: operators of graphs, and storages that go to the host and back over the device's link."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from skirl.sweep.capture import Captured
from skirl.sweep.memory.schedule import Step


class Link:
    """What moves storages to the host and back, at a rate in bytes a second each way that plans count with. This one is for
    a machine without a device: copies are made at once."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def offload(self, data: Tensor) -> Any:
        """Begin to copy bytes to the host."""
        return data.clone()

    def reload(self, copied: Tensor, device: torch.device) -> Any:
        """Begin to copy them back, into new memory."""
        return copied.clone()

    def wait(self, moving: Any) -> Tensor:
        """Wait for either, and return the copy."""
        return moving


class DeviceLink(Link):
    """A GPU's own link, by torch's operators: pinned memory, a stream, events. The GPU waits, and not the host. No GPU
    has run it yet."""

    def offload(self, data: Tensor) -> Any:
        return torch.ops.ao.offload(data), data

    def reload(self, copied: Tensor, device: torch.device) -> Any:
        return torch.ops.ao.reload(copied, device), copied

    def wait(self, moving: Any) -> Tensor:
        return torch.ops.ao.wait_tensor(*moving)


class Pack:
    """A pack while its schedule runs, with a method for each kind of action.

    - `enter`: returns the graph's inputs. Rows' outputs are held from then on.
    - `leave`: takes the graph's outputs.
    - `drawing`: stands around operators that draw random numbers.
    """

    def __init__(
        self,
        captured: Captured,
        step: Step,
        link: Link,
        enter: Callable[[], Sequence[Tensor]],
        leave: Callable[[Sequence[Any]], None],
        drawing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.captured, self.step, self.link = captured, step, link
        self._enter, self._leave, self._drawing = enter, leave, drawing
        self._nodes = {node.name: node for node in captured.graph.graph.nodes}
        self._names = [name for name, node in self._nodes.items() if node.op == "placeholder"]
        self._constants = {name: node.meta["val"] for name, node in self._nodes.items() if node.op == "get_attr"}
        self.results, self.inputs = dict[str, Any](), dict[str, Tensor]()
        self.moving = dict[str, Any]()
        self._storages = dict[str, torch.UntypedStorage]()
        self.away = dict[str, tuple[Tensor, torch.device, list[Any]]]()
        """Copies on the host, where they come from, and the results that were in them, with their layouts."""

    def enter(self, _: str) -> None:
        self.inputs = self._constants | dict(zip(self._names, self._enter(), strict=True))

    def run(self, name: str) -> None:
        def found(of: fx.Node) -> Any:
            return self.results[of.name] if of.op == "call_function" else self.inputs[of.name]

        node, operator, began = self._nodes[name], self.step.operators[name], time.perf_counter()
        with self._drawing() if operator.draws else nullcontext():
            self.results[name] = node.target(*map_arg(node.args, found), **map_arg(node.kwargs, found))
        if not self.step.seconds:
            if torch.cuda.is_initialized():
                torch.accelerator.synchronize()
            self.step.times.setdefault(name, []).append(time.perf_counter() - began)
        if operator.makes:
            storages = [each.untyped_storage() for each in _tensors(self.results[name])]
            made = [*{each._cdata: each for each in storages}.values()]
            self._storages |= {each: made[int(each.rpartition(".")[2])] for each in operator.makes}

    def free(self, storage: str) -> None:
        del self._storages[storage]
        for name in self.step.aliases[storage]:
            self.results.pop(name, None)

    def offload(self, storage: str) -> None:
        own = self._storages[storage]
        self.moving[storage] = self.link.offload(torch.empty(0, dtype=torch.uint8, device=own.device).set_(own))

    def release(self, storage: str) -> None:
        own, results = self._storages.pop(storage), [self.results.get(name) for name in self.step.aliases[storage]]
        inside = {id(each): each for each in _tensors(results) if each.untyped_storage()._cdata == own._cdata}
        layouts = [(each, each.storage_offset(), each.shape, each.stride()) for each in inside.values()]
        for each in inside.values():
            each.set_(torch.UntypedStorage(0, device=own.device), 0, (0,), (1,))
        self.away[storage] = self.link.wait(self.moving.pop(storage)), own.device, layouts

    def reload(self, storage: str) -> None:
        self.moving[storage] = self.link.reload(*self.away[storage][:2])

    def back(self, storage: str) -> None:
        own = self._storages[storage] = self.link.wait(self.moving.pop(storage)).untyped_storage()
        for each, *layout in self.away.pop(storage)[2]:
            each.set_(own, *layout)

    def leave(self, _: str) -> None:
        outputs: Any = self._nodes["output"].args[0]
        results = [self.results[each.name] if isinstance(each, fx.Node) else each for each in outputs]
        self.results, self.inputs, self._storages = {}, {}, {}
        self._leave(results)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
