"""Limit what a node unpickles from a call: tensors, plain values, and the names of the store's own functions."""

import pickle
from collections.abc import Callable, Iterable
from typing import Any

_GROUP = {
    ("torch.distributed.rpc.internal", "PythonUDF"),
    ("torch.distributed.rpc.internal", "RemoteException"),
    ("torch.distributed.rpc._utils", "_update_group_membership"),
    ("torch.distributed.rpc.backend_registry", "_get_device_infos"),
    ("torch._C._distributed_rpc", "WorkerInfo"),
    ("torch", "device"),
}
"""Names that members of a group use when one joins."""


def only(functions: Iterable[Callable[..., Any]]) -> None:
    """Let other processes call only these functions in this one, and those that are needed to join a group."""
    from torch.distributed.rpc import internal

    allowed = {(f.__module__, f.__qualname__): f for f in functions}
    tensor = internal._InternalRPCPickler._tensor_receiver

    class KnownNames(pickle.Unpickler):
        """An unpickler that refuses every other name."""

        def find_class(self, module: str, name: str, /) -> Any:
            if (module, name) in allowed:
                return allowed[module, name]
            if (module, name) in _GROUP:
                return super().find_class(module, name)
            if (module, name) == ("torch.distributed.rpc.internal", "_InternalRPCPickler"):
                return _PICKLER
            if (module, name) == ("builtins", "getattr"):
                return lambda of, attribute: tensor if (of, attribute) == (_PICKLER, "_tensor_receiver") else None
            raise AttributeError(f"{module}.{name} is called by name: a node calls nothing but its store's functions")

    internal._unpickler = KnownNames


_PICKLER = "what makes tensors of a call"
