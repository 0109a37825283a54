"""The modules: those that look up ids, and `OncePerBag`, which runs an encoder once per distinct bag."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skirl.core.once import Distinct, OncePerBag

__all__ = ["Distinct", "OncePerBag"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from skirl.core import once

    return getattr(once, name)
