"""Helpers that know nothing of recommendation models."""

import ast
import inspect
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def lazily(package: str, *packages: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports on first use: `packages` in it, and what its `if TYPE_CHECKING:`
    block names.
    """

    @cache
    def modules() -> dict[str, str]:
        tree = ast.parse(inspect.getsource(sys.modules[package]))
        block = next(node for node in tree.body if isinstance(node, ast.If)).body
        return {
            name.name: str(node.module) for node in block if isinstance(node, ast.ImportFrom) for name in node.names
        }

    def get(name: str) -> Any:
        if name in packages:
            value = import_module(f"{package}.{name}")
        elif not name.startswith("__") and name in modules():
            value = getattr(import_module(modules()[name]), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return get
