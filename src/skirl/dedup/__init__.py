"""Finds lists that repeat between the samples of a batch, so that each is looked up once."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skirl.core.find import find

__all__ = ["find"]


def __getattr__(name: str) -> Any:
    if name != "find":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from skirl.core.find import find

    return find
