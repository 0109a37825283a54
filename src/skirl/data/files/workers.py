"""Reads encoded pieces of a data set in order, in this process or in several, with the same result."""

import multiprocessing
import os
import signal
from collections.abc import Generator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from skirl.data.files.dataset import Dataset, FilePart
from skirl.data.files.encode import Encoder
from skirl.data.files.encoded import Encoded
from skirl.data.files.windows import Windows

PATIENCE = 5.0
"""Seconds to wait for a worker to exit by itself."""


class WorkerDied(RuntimeError):
    """Raised if a worker process ended without an error message."""


def pieces(
    dataset: Dataset, encoder: Encoder, ranges: Sequence[Windows], workers: int
) -> Generator[tuple[Encoded, FilePart] | None, None, None]:
    """Yield the encoded pieces of each range in turn, with their parts, and None at the end of each range."""
    if workers:
        yield from _by_workers(dataset, encoder, ranges, workers)
        return
    try:
        for stretch in ranges:
            for part, rows in stretch.parts(dataset):
                yield _read(dataset, encoder, part, rows), part
            yield None
    finally:
        dataset.close()


def _read(dataset: Dataset, encoder: Encoder, part: FilePart, rows: np.ndarray | None) -> Encoded:
    if rows is not None and not len(rows):
        return Encoded.nothing(encoder.schema)
    return encoder(dataset.read(part, rows))


def _by_workers(
    dataset: Dataset, encoder: Encoder, ranges: Sequence[Windows], workers: int
) -> Generator[tuple[Encoded, FilePart] | None, None, None]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["skirl.data.files.workers"])  # imports modules once, which takes 2 s
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
            # A worker that sends None has no such share. Then there is no later one either, and all others send None too.
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
    pipe: Connection, dataset: Dataset, encoder: Encoder, ranges: Sequence[Windows], number: int, workers: int
) -> None:
    """Run a worker. It sends (piece, part, whether it ends a share) for each piece, None after each range, or its error."""
    # Ctrl-C and SIGTERM also reach the training process, which saves and then ends this worker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        try:
            for stretch in ranges:
                before: tuple[Encoded, FilePart] | None = None
                for part, rows in stretch.parts(dataset):
                    if part.share % workers != number:
                        continue
                    if before is not None:
                        pipe.send((*before, before[1].share != part.share))
                    before = _read(dataset, encoder, part, rows), part
                if before is not None:
                    pipe.send((*before, True))
                pipe.send(None)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except BaseException as error:
            pipe.send(error)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # nobody reads the pipe any more
    finally:
        dataset.close()
