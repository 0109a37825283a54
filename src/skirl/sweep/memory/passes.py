"""What torch names in private: all of it is here. A torch that has other names is refused, and only by who wants this."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.traceback import preserve_node_meta
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

try:
    from torch._functorch._activation_checkpointing.remat_using_tags_for_fwd_loss_bwd_graph_pass import (
        remat_using_tags_for_fwd_loss_bwd_graph,
    )
    from torch._functorch._activation_offloading import offload_ops as offload_ops  # makes torch.ops.ao
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.checkpoint import CheckpointPolicy
except ImportError as error:
    raise ImportError(
        f"memory of a sweep is planned with parts of torch 2.13, and torch {torch.__version__} has other ones ({error}): "
        "install torch 2.13, or run the sweep without --memory"
    ) from None


class Indices(TorchDispatchMode):
    """Computes for real what no value of a row or a weight goes into, but places: models ask for these numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, kwargs = tree_leaves((args, kwargs)), kwargs or {}
        tensors = [each for each in given if isinstance(each, Tensor)]
        asked = kwargs.get("dtype") or (torch.get_default_dtype() if _float_by_default(func, given) else torch.int64)
        if any(isinstance(each, FakeTensor) for each in tensors) or (not tensors and asked.is_floating_point):
            return func(*args, **kwargs)
        with torch.utils._python_dispatch._disable_current_modes():
            return func(*args, **kwargs)


def _float_by_default(func: Any, given: Sequence[Any]) -> bool:
    return func.overloadpacket is not torch.ops.aten.arange or any(isinstance(each, float) for each in given)


def traced(step: Callable[..., Any], given: Sequence[Tensor]) -> tuple[fx.GraphModule, list[Tensor]]:
    """Return a function of tensors as a graph, and the inputs that it has behind the function's own: places that were
    computed. Nothing of the size of its data is allocated. Operators that write in place stay as they are:
    torch.func.functionalize would take losses apart, which changes bits."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(each.detach()).requires_grad_(each.requires_grad) for each in given]

    def with_indices(*args: Tensor) -> Any:
        with Indices():
            return step(*args)

    with mode, preserve_node_meta():
        graph = make_fx(with_indices)(*fakes)
    graph.graph.eliminate_dead_code()
    return graph, _lifted(graph)


def _lifted(graph: fx.GraphModule) -> list[Tensor]:
    """Make inputs of a graph's constants, and return them."""
    constants = [node for node in graph.graph.nodes if node.op == "get_attr"]
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    found: list[Tensor] = []
    for node in constants:
        with graph.graph.inserting_after(inputs[-1]):
            inputs.append(graph.graph.placeholder(f"place_{len(found)}"))
        found.append(getattr(graph, node.target))
        inputs[-1].meta["val"] = found[-1]
        node.replace_all_uses_with(inputs[-1])
        graph.graph.erase_node(node)
    graph.recompile()
    return found


def recomputed(graph: fx.GraphModule, again: Iterable[str]) -> list[str]:
    """Return the names of a graph's operators in the order in which they run if these ones run again in backward."""
    tagged, again = fx.Graph(), set(again)
    tagged.output(tagged.graph_copy(graph.graph, {}))
    copy = fx.GraphModule(graph, tagged)
    for node, own in zip(copy.graph.nodes, graph.graph.nodes, strict=True):
        node.meta = {"name": own.name, "custom": own.meta.get("custom", {})}
        if own.name in again:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    nodes = remat_using_tags_for_fwd_loss_bwd_graph(copy).graph.nodes if again else graph.graph.nodes
    return [node.meta.get("name", node.name) for node in nodes if node.op == "call_function"]
