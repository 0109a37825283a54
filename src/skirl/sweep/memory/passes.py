"""What torch names in private: all of it is here. A torch that has other names is refused, and only by who wants this."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

try:
    from torch._functorch._activation_offloading import offload_ops as offload_ops  # makes torch.ops.ao
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import annotate as annotate
    from torch.fx.traceback import preserve_node_meta
except ImportError as error:
    raise ImportError(
        f"memory of a sweep is planned with parts of torch 2.13, and torch {torch.__version__} has other ones ({error}): "
        "install torch 2.13, or run the sweep without --memory"
    ) from None


class Places(TorchDispatchMode):
    """Computes for real what no row, weight or number of the batch goes into, but places: models ask for their values."""

    def __init__(self) -> None:
        super().__init__()
        self._own = dict[int, Tensor]()
        self.of_batch = False
        """Whether a tensor from elsewhere was taken: it may be another one for the next batch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, kwargs = tree_leaves((args, kwargs)), kwargs or {}
        tensors = [each for each in given if isinstance(each, Tensor)]
        if func is not torch.ops.aten.lift_fresh.default:  # torch.tensor and from_numpy: a model made it
            self.of_batch |= any(not isinstance(each, FakeTensor) and id(each) not in self._own for each in tensors)
        counts = func.overloadpacket is torch.ops.aten.arange and not any(isinstance(each, float) for each in given)
        made = kwargs.get("dtype") or (torch.int64 if counts else torch.get_default_dtype())
        if any(isinstance(each, FakeTensor) for each in tensors) or (not tensors and made.is_floating_point):
            return func(*args, **kwargs)
        with _disable_current_modes():
            out = func(*args, **kwargs)
        self._own |= {id(each): each for each in tree_leaves(out) if isinstance(each, Tensor)}
        return out


def traced(step: Callable[..., Any], given: Sequence[Tensor]) -> tuple[fx.GraphModule, list[Tensor], bool]:
    """Return a function of tensors as a graph, the inputs that it has behind the function's own, which are places that
    were computed, and whether they are only those of this batch. Nothing of the size of its data is allocated. Operators
    that write in place stay as they are: torch.func.functionalize would take losses apart, which changes bits."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(each.detach()).requires_grad_(each.requires_grad) for each in given]
    computed = Places()

    def with_places(*args: Tensor) -> Any:
        with computed:
            return step(*args)

    with mode, preserve_node_meta():
        graph = make_fx(with_places)(*fakes)
    graph.graph.eliminate_dead_code()
    inputs, places = [node for node in graph.graph.nodes if node.op == "placeholder"], list[Tensor]()
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        with graph.graph.inserting_after(inputs[-1]):
            inputs.append(graph.graph.placeholder(f"place_{len(places)}"))
        places.append(getattr(graph, node.target))
        inputs[-1].meta["val"] = places[-1]
        node.replace_all_uses_with(inputs[-1])
        graph.graph.erase_node(node)
    graph.recompile()
    return graph, places, computed.of_batch


def fakes_of(tensors: Sequence[Tensor]) -> tuple[FakeTensorMode, list[Tensor]]:
    """Return tensors that allocate nothing, and the mode in which they are computed with."""
    mode = FakeTensorMode()
    return mode, [mode.from_tensor(each) for each in tensors]
