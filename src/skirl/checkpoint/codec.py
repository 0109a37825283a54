"""What a checkpoint holds besides rows: values as JSON with named tensors, and these in one safetensors file, in a folder of
its own for the HuggingFaceStorageReader of torch.distributed.checkpoint. Decoding needs no torch."""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skirl.store.disk.manifest import check_sizes
from skirl.tools.sealed_json import CheckpointError, sync_folder, to_disk

if TYPE_CHECKING:
    from torch import Tensor

DENSE = "model.safetensors"


def encode(value: Any, where: str) -> tuple[Any, dict[str, "Tensor"]]:
    """Return a value as JSON, and its tensors by name, copied to the CPU."""
    tensors: dict[str, Tensor] = {}
    return _encode(value, where, tensors), tensors


def _encode(value: Any, where: str, tensors: dict[str, "Tensor"]) -> Any:
    import torch

    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if np.isfinite(value) else {"~float": str(value)}
    if isinstance(value, torch.Tensor):
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


def _pairs(value: dict[Any, Any], where: str, tensors: dict[str, "Tensor"]) -> list[Any]:
    return [[_encode(key, where, tensors), _encode(item, f"{where}.{key}", tensors)] for key, item in value.items()]


def _encode_array(value: np.ndarray | np.generic, where: str, tensors: dict[str, "Tensor"]) -> Any:
    import torch

    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.names:
        raise TypeError(f"{where} is an array of {array.dtype}, which a checkpoint cannot hold: use numbers")
    raw = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())
    scalar = isinstance(value, np.generic)
    return {"~array": [_put(raw, where, tensors), array.dtype.str, list(array.shape), scalar]}


def _plain(value: "Tensor", where: str) -> "Tensor":
    import torch
    from safetensors.torch import _TYPES  # what the file can hold

    if value.layout != torch.strided or value.is_quantized or value.dtype not in _TYPES.values():
        raise TypeError(
            f"{where} is a {value.layout} tensor of {value.dtype}, which a checkpoint cannot hold: make it dense, and of "
            "another type; for gradients, call zero_grad() before save"
        )
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)


def _put(tensor: "Tensor", where: str, tensors: dict[str, "Tensor"]) -> str:
    name, again = where, 0
    while name in tensors:  # a dict may have the key "a.b", and a key "a" whose value has "b"
        again += 1
        name = f"{where}~{again}"
    tensors[name] = tensor
    return name


def decode(coded: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(coded, list):
        return [decode(item, tensors) for item in coded]
    if not isinstance(coded, dict):
        return coded
    if len(coded) == 1:
        [(tag, content)] = coded.items()
        if tag.startswith("~"):
            return _decode_tagged(tag, content, tensors)
    return {key: decode(item, tensors) for key, item in coded.items()}


def _decode_tagged(tag: str, content: Any, tensors: Mapping[str, Any]) -> Any:
    match tag:
        case "~float":
            return float(content)
        case "~tensor":
            return tensors[content]
        case "~array":
            name, dtype, shape, scalar = content
            array = np.frombuffer(tensors[name].numpy().tobytes(), np.dtype(dtype)).reshape(shape).copy()
            return array[()] if scalar else array
        case "~tuple":
            return tuple(decode(item, tensors) for item in content)
        case "~dict" | "~counter":
            pairs = {decode(key, tensors): decode(item, tensors) for key, item in content}
            return pairs if tag == "~dict" else Counter(pairs)
        case "~bytes":
            return bytes.fromhex(content)
    raise ValueError(tag)


def loader_state(state: Any) -> Any:
    """Return the state of a loader, which a lookahead or the loader itself has saved; None if no batch was read."""
    return state["loader"] if isinstance(state, dict) and "loader" in state else state


def with_metadata(state: dict[str, Any], metadata: Any) -> "OrderedDict[str, Any]":
    out = OrderedDict(state)
    if metadata is not None:
        out._metadata = metadata  # type: ignore[attr-defined]
    return out


def write_dense(folder: Path, mark: str, tensors: dict[str, "Tensor"]) -> dict[str, Any]:
    """Write tensors and wait until they are on disk. Return their entry for the header."""
    from safetensors.torch import save_file

    own = folder / f"dense-{mark}"
    own.mkdir()
    path = own / DENSE
    save_file(tensors, path, metadata={"format": "pt"})
    with path.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        to_disk(file)
    sync_folder(own)
    sync_folder(folder)
    return {"file": f"{own.name}/{DENSE}", "bytes": path.stat().st_size, "sha256": digest}


def read_dense(folder: Path, entry: dict[str, Any]) -> dict[str, "Tensor"]:
    from safetensors.torch import load_file

    path = folder / entry["file"]
    if path.parent.parent != folder or ".." in path.parts[-2:]:
        raise CheckpointError(f"{entry['file']!r} is a file outside its folder: do not trust this checkpoint")
    check_sizes(folder, {entry["file"]: entry["bytes"]})
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
            raise CheckpointError(f"{path} is damaged, its checksum differs: use another checkpoint")
    return load_file(path)
