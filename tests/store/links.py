"""Stores behind a slow link, wherever an engine opens one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from skirl.engine import engine
from skirl.store.link import LinkStore
from skirl.tools.units import Link


@contextmanager
def behind_a_link(text: str) -> Iterator[None]:
    """Let each engine that is made in this block reach its store over this link."""
    opened = engine.open_store

    def open_store(*given: Any, **options: Any) -> LinkStore:
        return LinkStore(opened(*given, **options), Link.parse(text))

    engine.open_store = open_store
    try:
        yield
    finally:
        engine.open_store = opened
