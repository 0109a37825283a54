"""Working on the items of an iterator in several threads, with the results in the order of the items."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from queue import Empty, Full, Queue
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
_GLANCE = 0.05
"""Seconds between two checks whether anybody still wants more."""


@contextmanager
def side_by_side(work: Callable[[T], R], items: Iterator[T], threads: int) -> Iterator[Iterator[R]]:
    """Do `work` in several threads, with results in the order of `items`. An error is raised in place of its result.

    The thread that works on an item is the one that took it from the iterator; one thread at a time takes. When the
    block has ended, so have all threads.

    >>> with side_by_side(lambda n: n * n, iter(range(5)), 3) as squares:
    ...     print(list(squares))
    [0, 1, 4, 9, 16]
    """
    ready: Queue[Future[R] | None] = Queue(threads)
    taking, over = threading.Lock(), threading.Event()

    def give(result: "Future[R] | None") -> bool:
        while not over.is_set():
            with suppress(Full):
                ready.put(result, timeout=_GLANCE)
                return True
        return False

    def take() -> "tuple[T, Future[R]] | None":
        with taking:
            if over.is_set() or ended:
                return None
            result: Future[R] = Future()
            try:
                item = next(items)
            except StopIteration:
                ended.append(True)
                give(None)
                return None
            except BaseException as error:
                ended.append(True)
                result.set_exception(error)
                give(result)
                return None
            return (item, result) if give(result) else None

    def run() -> None:
        while (taken := take()) is not None:
            item, result = taken
            try:
                result.set_result(work(item))
            except BaseException as error:
                result.set_exception(error)

    def results() -> Iterator[R]:
        while (result := ready.get()) is not None:
            yield result.result()

    ended: list[bool] = []
    running = [threading.Thread(target=run, daemon=True, name=f"skirl-side-{n}") for n in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield results()
    finally:
        over.set()
        for thread in running:
            while thread.is_alive():
                with suppress(Empty):
                    ready.get_nowait()  # a thread that waits for room goes on, and sees that it is over
                thread.join(_GLANCE)
        if (close := getattr(items, "close", None)) is not None:
            close()


def in_thread(items: Iterable[T]) -> AbstractContextManager[Iterator[T]]:
    """Read items ahead in a thread. When the block has ended, so has the thread, and a generator that it read is closed.

    >>> with in_thread(range(5)) as numbers:
    ...     print(list(numbers))
    [0, 1, 2, 3, 4]
    """
    return side_by_side(lambda item: item, iter(items), 1)
