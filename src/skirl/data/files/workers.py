"""Encoded pieces of a data set in order, read by this process or by several: what comes out is the same."""

import multiprocessing
import os
import signal
from collections.abc import Generator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from skirl.data.files.dataset import Dataset, Part, Place
from skirl.data.files.encode import Encoded, Encoder

PATIENCE = 5.0
"""Seconds that a worker has to end by itself."""


class WorkerDied(RuntimeError):
    """A worker process ended without a word."""


Range = tuple[Place, Place | None]
"""From a place to before another, or to the end."""


def pieces(
    dataset: Dataset, encoder: Encoder, ranges: Sequence[Range], workers: int
) -> Generator[tuple[Encoded, Part] | None, None, None]:
    """Encoded pieces of one range after the other, each with its part; None where a range ends."""
    if workers:
        yield from _by_workers(dataset, encoder, ranges, workers)
        return
    try:
        for begin, end in ranges:
            for part in dataset.parts(begin, end):
                yield encoder(dataset.read(part)), part
            yield None
    finally:
        dataset.close()


def _by_workers(
    dataset: Dataset, encoder: Encoder, ranges: Sequence[Range], workers: int
) -> Generator[tuple[Encoded, Part] | None, None, None]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["skirl.data.files.workers"])  # imports 2 s of modules once
    team: list[tuple[Any, Connection]] = []
    try:
        for number in range(workers):
            ours, theirs = context.Pipe(duplex=False)
            what = (theirs, dataset, encoder, ranges, number, workers)
            process = context.Process(target=_work, args=what, daemon=True, name=f"skirl-reader-{number}")
            process.start()
            theirs.close()
            team.append((process, ours))
        for _ in ranges:
            share = 0
            # A worker that has no such share says None: then there is no later one either, and all others say so too.
            while (message := _receive(*team[share % workers])) is not None:
                if isinstance(message, BaseException):
                    raise message
                piece, part, last = message
                yield piece, part
                if last:
                    share += 1
            for other in range(workers):
                if other != share % workers and _receive(*team[other]) is not None:
                    raise RuntimeError(
                        "readers disagree about where the data ends: do the files change while they are read?"
                    )
            yield None
    finally:
        for _, pipe in team:
            pipe.close()
        for process, _ in team:
            process.kill()  # they ignore SIGTERM, and have nothing to save
        for process, _ in team:
            process.join()
            process.close()


def _receive(process: Any, pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        process.join(PATIENCE)
        raise WorkerDied(
            f"a reader process ended by itself (exit code {process.exitcode}): is there enough memory? Set workers to 0 "
            "to read in this process"
        ) from None


def _work(
    pipe: Connection, dataset: Dataset, encoder: Encoder, ranges: Sequence[Range], number: int, workers: int
) -> None:
    """A worker: sends (piece, part, whether it is the last of its share), None at the end of a range, or what ended it."""
    # Ctrl-C and a SIGTERM to the process group are the training process's, which saves and then ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        try:
            for begin, end in ranges:
                before: tuple[Encoded, Part] | None = None
                for part in dataset.parts(begin, end):
                    if part.share % workers != number:
                        continue
                    if before is not None:
                        pipe.send((*before, before[1].share != part.share))
                    before = encoder(dataset.read(part)), part
                if before is not None:
                    pipe.send((*before, True))
                pipe.send(None)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except BaseException as error:
            pipe.send(error)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # nobody listens any more
    finally:
        dataset.close()
