"""An iterable that a thread reads ahead, so that whoever takes its items does not wait for them."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from queue import Empty, Full, Queue
from typing import TypeVar

T = TypeVar("T")
_END = object()
_GLANCE = 0.05
"""Seconds between two checks whether anybody still wants more."""


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


@contextmanager
def in_thread(items: Iterable[T], room: int = 2) -> Iterator[Iterator[T]]:
    """Read items in a thread, at most `room` of them ahead. An error is raised where its item would have come.

    When the block has ended, so has the thread, and a generator that it read is closed.

    >>> with in_thread(range(5)) as numbers:
    ...     print(list(numbers))
    [0, 1, 2, 3, 4]
    """
    ready: Queue[object] = Queue(room)
    over = threading.Event()

    def give(item: object) -> bool:
        while not over.is_set():
            try:
                ready.put(item, timeout=_GLANCE)
            except Full:
                continue
            return True
        return False

    def read() -> None:
        source = iter(items)
        try:
            for item in source:
                if not give(item):
                    break
            give(_END)
        except BaseException as error:
            give(_Failed(error))
        finally:
            if (close := getattr(source, "close", None)) is not None:
                close()

    def taken() -> Iterator[T]:
        while (item := ready.get()) is not _END:
            if isinstance(item, _Failed):
                raise item.error
            yield item  # pyright: ignore[reportReturnType]

    thread = threading.Thread(target=read, daemon=True, name="skirl-reading")
    thread.start()
    try:
        yield taken()
    finally:
        over.set()
        while thread.is_alive():
            try:
                ready.get_nowait()  # a thread that waits for room goes on, and sees that it is over
            except Empty:
                thread.join(_GLANCE)
