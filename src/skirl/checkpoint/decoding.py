"""Decode state dicts from the JSON and named tensors of `codec.py`, without importing torch."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from skirl.tools.sealed_json import CheckpointError


def decode(coded: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the value that `codec.encode` was given.

    >>> decode({"~dict": [["lr", 0.1], [7, {"~tuple": [1, None]}]]}, {})
    {'lr': 0.1, 7: (1, None)}
    """
    try:
        return _decode(coded, tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint's structure is damaged ({error!r}): use another checkpoint") from None


def _decode(coded: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(coded, list):
        return [_decode(item, tensors) for item in coded]
    if not isinstance(coded, dict):
        return coded
    if len(coded) == 1:
        [(tag, content)] = coded.items()
        if tag.startswith("~"):
            return _decode_tagged(tag, content, tensors)
    return {key: _decode(item, tensors) for key, item in coded.items()}


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
            return tuple(_decode(item, tensors) for item in content)
        case "~dict" | "~counter":
            pairs = {_decode(key, tensors): _decode(item, tensors) for key, item in content}
            return pairs if tag == "~dict" else Counter(pairs)
        case "~bytes":
            return bytes.fromhex(content)
    raise ValueError(f"unknown word {tag}")
