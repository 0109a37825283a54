"""Finds lists that repeat between the samples of a batch, so that each is looked up once."""

from typing import TYPE_CHECKING

from skirl.tools import lazily

if TYPE_CHECKING:
    from skirl.core.once import find

__all__ = ["find"]

__getattr__ = lazily(__name__)
