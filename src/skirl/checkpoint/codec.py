"""Values of a checkpoint as JSON and tensors."""

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from safetensors.torch import _TYPES as _STORABLE  # what a safetensors file can hold
from torch import Tensor

_DTYPES = frozenset(_STORABLE.values())


def encode(value: Any, where: str) -> tuple[Any, dict[str, Tensor]]:
    """Return a value as JSON, and its tensors by name, copied to the CPU.

    >>> encode({"lr": 0.1, "state": {0: {"step": torch.tensor(3.0)}}}, "adam")
    ({'lr': 0.1, 'state': {'~dict': [[0, {'step': {'~tensor': 'adam.state.0.step'}}]]}}, {'adam.state.0.step': tensor(3.)})
    """
    tensors: dict[str, Tensor] = {}
    return _encode(value, where, tensors), tensors


def _encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if np.isfinite(value) else {"~float": str(value)}
    if isinstance(value, Tensor):
        return {"~tensor": _put(_plain(value, where), where, tensors)}
    if isinstance(value, np.ndarray | np.generic):
        return _encode_array(value, where, tensors)
    if kind in (list, tuple, torch.Size):
        items = [_encode(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
        return items if kind is list else {"~tuple": items}
    if kind is Counter:
        return {"~counter": _pairs(value, where, tensors)}
    if isinstance(value, dict):  # torch's subclasses too, which come back as plain dicts
        if all(type(key) is str and not key.startswith("~") for key in value):
            return {key: _encode(item, f"{where}.{key}", tensors) for key, item in value.items()}
        return {"~dict": _pairs(value, where, tensors)}
    if kind is bytes:
        return {"~bytes": value.hex()}
    raise TypeError(
        f"{where} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: state dicts may have "
        "tensors, arrays, numbers, strings, bytes, lists, tuples and dicts"
    )


def _pairs(value: dict[Any, Any], where: str, tensors: dict[str, Tensor]) -> list[Any]:
    return [[_encode(key, where, tensors), _encode(item, f"{where}.{key}", tensors)] for key, item in value.items()]


def _encode_array(value: np.ndarray | np.generic, where: str, tensors: dict[str, Tensor]) -> Any:
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.names:
        raise TypeError(f"{where} is an array of {array.dtype}, which a checkpoint cannot hold: use numbers")
    raw = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())
    scalar = isinstance(value, np.generic)
    return {"~array": [_put(raw, where, tensors), array.dtype.str, list(array.shape), scalar]}


def _plain(value: Tensor, where: str) -> Tensor:
    if value.layout != torch.strided or value.is_quantized or value.dtype not in _DTYPES:
        raise TypeError(
            f"{where} is a {value.layout} tensor of {value.dtype}, which a checkpoint cannot hold: make it dense, and of "
            "another type; for gradients, call zero_grad() before save"
        )
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)


def _put(tensor: Tensor, where: str, tensors: dict[str, Tensor]) -> str:
    name, again = where, 0
    while name in tensors:  # a dict may have the key "a.b", and a key "a" whose value has "b"
        again += 1
        name = f"{where}~{again}"
    tensors[name] = tensor
    return name


def with_metadata(state: dict[str, Any], metadata: Any) -> "OrderedDict[str, Any]":
    """Return a module's state dict in torch's form, with the versions of its modules as an attribute."""
    out = OrderedDict(state)
    if metadata is not None:
        out._metadata = metadata  # type: ignore[attr-defined]
    return out
