"""What torch names in private: all of it is here. A torch that has other names is refused, and only by who wants this."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from skirl.models.pairs import LOOPS

try:
    from torch._functorch._activation_offloading import offload_ops as offload_ops  # makes torch.ops.ao
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import annotate as annotate
    from torch.fx.traceback import preserve_node_meta
except ImportError as error:
    raise ValueError(
        f"steps of a sweep are captured with parts of torch 2.13, and torch {torch.__version__} has other ones ({error}): "
        "install torch 2.13, or run the sweep without --memory"
    ) from None

_ATEN = torch.ops.aten
VIEWS = {
    _ATEN.view.default, _ATEN.detach.default, _ATEN.transpose.int, _ATEN.permute.default, _ATEN.expand.default,
    _ATEN.unsqueeze.default, _ATEN.squeeze.dims, _ATEN.t.default,
}  # fmt: skip
"""Views that begin where their tensor does."""


class Places(TorchDispatchMode):
    """Computes for real what a model counts by itself, such as places in a list: models ask for their values."""

    def __init__(self) -> None:
        super().__init__()
        self._own = dict[int, Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = func is torch.ops.aten.lift_fresh.default  # torch.tensor and from_numpy
        if not made and any(not isinstance(each, FakeTensor) and id(each) not in self._own for each in tensors):
            raise ValueError(
                "a model takes a tensor that is no weight, buffer, row, dense feature or label, which planned memory does "
                "not know of: make it a buffer, or run without --memory"
            )
        counts = not tensors and func.overloadpacket is torch.ops.aten.arange
        if any(isinstance(each, FakeTensor) for each in tensors) or not (tensors or counts):
            return func(*args, **kwargs)
        with _disable_current_modes():
            out = func(*args, **kwargs)
        self._own |= {id(each): each for each in tree_leaves(out) if isinstance(each, Tensor)}
        return out


def traced(step: Callable[..., Any], given: Sequence[Tensor]) -> fx.GraphModule:
    """Return a function of tensors as a graph. Places that were computed are constants of it. Nothing of the size of its
    data is allocated. Operators that write in place stay as they are: torch.func.functionalize would take losses apart,
    which changes bits."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(each.detach()).requires_grad_(each.requires_grad) for each in given]

    def with_places(*args: Tensor) -> Any:
        with Places():
            return step(*args)

    with mode, preserve_node_meta():
        graph = make_fx(with_places)(*fakes)
    for node in graph.graph.find_nodes(op="get_attr"):
        node.meta["val"] = getattr(graph, node.target)
    _show_once(graph)
    return graph


def stacked(step: Callable[..., Any], given: Sequence[Tensor]) -> fx.GraphModule:
    graph = make_fx(step)(*given)
    call_loops(graph)
    _show_once(graph)
    return graph


def call_loops(graph: fx.GraphModule) -> None:
    """Let a graph that runs as it is call our loops, and not their operators."""
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.name() in LOOPS:
            node.target = LOOPS[node.target.name()]


def _show_once(graph: fx.GraphModule) -> None:
    """Take out views that show a value as it is, and all that nothing takes."""
    for node in graph.graph.nodes:
        if (same := _shown(node)) is not None:
            node.replace_all_uses_with(same)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _shown(view: fx.Node) -> fx.Node | None:
    """Return the value that a view shows as it is."""
    base: Any = view
    while base.target in VIEWS:
        base = base.args[0]
        if _layout(base) == _layout(view):
            return base
    return None


def _layout(node: fx.Node) -> tuple[object, ...]:
    value = node.meta["val"]
    return value.shape, value.stride()
