"""Forked copies of this process that compute the logits of batches; threads would wait for the GIL."""

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import nn

from skirl.core.batch import Batch, KeyedJagged
from skirl.core.inverse import is_shared
from skirl.nn.collection import collections_of
from skirl.tools.shared_slots import SharedSlots
from skirl.train.evaluation import evaluating

POSSIBLE = sys.platform == "linux"
"""On other systems, a fork of a process that has begun to compute may hang."""


AHEAD = 4
"""Batches that a process may hold: one it computes, the next, whose rows it has looked up, and two that wait."""
ROOM = 16 << 20
"""Maximum bytes of a batch in shared memory; a larger one goes through a pipe."""


class ProcessDied(RuntimeError):
    """A process that predicts has ended without an error message."""


class Forked:
    """Processes with a copy of a model each, and one compute thread each."""

    def __init__(self, team: list[tuple[Any, Connection, Connection]], slots: list[SharedSlots | None]) -> None:
        self._team, self._slots = team, slots
        self._free = [threading.Semaphore(AHEAD) for _ in slots]
        self._over = False

    def __len__(self) -> int:
        return len(self._team)

    def send(self, turn: int, batch: Batch) -> None:
        """Send batch number `turn` to its process, waiting while that has enough to do. Only one thread may call this."""
        which = turn % len(self._team)
        process, pipe, _ = self._team[which]
        if not self._over:
            self._free[which].acquire()
        if self._over:
            raise _died(process)
        keys, *arrays = _packed(batch)
        slots = self._slots[which]
        layout = None if slots is None else slots.put(turn // len(self._team) % AHEAD, arrays)
        try:
            pipe.send((keys, layout, arrays if layout is None else None))
        except OSError:
            raise _died(process) from None

    def stop(self) -> None:
        """Kill the processes and wake every thread that waits for one of them."""
        self._over = True
        for process, _, _ in self._team:
            process.kill()  # they ignore SIGTERM, and have nothing to save
        for free in self._free:
            free.release()  # wakes a thread that waits to send

    def end(self) -> None:
        """Tell the processes that no more batches will come. Only the sending thread may call this."""
        for process, pipe, _ in self._team:
            try:
                pipe.send(None)
            except OSError:
                raise _died(process) from None

    def receive(self, turn: int) -> np.ndarray:
        """Return the logits of batch number `turn`. Must be called in order."""
        which = turn % len(self._team)
        process, _, pipe = self._team[which]
        try:
            answer = pipe.recv()
        except (EOFError, OSError):
            raise _died(process) from None
        self._free[which].release()  # the process is done with this batch
        if isinstance(answer, BaseException):
            raise answer
        return answer


def able(model: nn.Module) -> bool:
    """Return whether a forked copy of this process can compute the model's logits, alike for each batch of one size."""
    engines = [collection.engine for collection in collections_of(model).values()]
    return POSSIBLE and all(
        engine.pooled and engine.device.by_any_thread and engine.store.in_any_process and engine.exchange is None
        for engine in engines
    )


@contextmanager
def forked(model: nn.Module, count: int) -> Iterator[Forked]:
    """Fork processes for the length of a block. No other thread may run when it begins."""
    context = multiprocessing.get_context("fork")
    team: list[tuple[Any, Connection, Connection]] = []
    slots = [_shared() for _ in range(count)]
    all_of_them = Forked(team, slots)
    try:
        for number in range(count):
            batches, to = context.Pipe(duplex=False)
            come, answers = context.Pipe(duplex=False)
            others = [to, come, *(pipe for _, *pipes in team for pipe in pipes)]
            what = (batches, answers, others, slots[number], model)
            process = context.Process(target=_work, args=what, daemon=True, name=f"skirl-predicting-{number}")
            with warnings.catch_warnings():  # Python 3.12 warns of threads; those of Arrow and torch handle a fork
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            batches.close()
            answers.close()
            team.append((process, to, come))
        yield all_of_them
    finally:
        all_of_them.stop()
        for process, *pipes in team:
            for pipe in pipes:
                pipe.close()
            process.join()
            process.close()


def _died(process: Any) -> ProcessDied:
    process.join(5.0)
    return ProcessDied(
        f"a process that predicts ended by itself (exit code {process.exitcode}): is there enough memory? Set threads to 1 "
        "to predict in this process"
    )


def _shared() -> SharedSlots | None:
    with suppress(OSError):  # not enough shared memory
        return SharedSlots(AHEAD, ROOM)
    return None


def _work(
    batches: Connection, answers: Connection, others: list[Connection], slots: SharedSlots | None, model: nn.Module
) -> None:
    """Run a process: answer each batch with its logits, or with the error that ended it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for other in others:  # or those who wait for the pipes to close would wait forever
        other.close()
    torch.set_num_threads(1)
    try:
        try:
            for collection in collections_of(model).values():
                collection.engine.adopt()
            with evaluating(model, _Sent(batches, slots), thread=False) as found, torch.no_grad():
                for batch in found:
                    answers.send(model(batch).float().cpu().numpy())
        except OSError:
            raise
        except BaseException as error:
            answers.send(error)
    except OSError:
        os._exit(0)  # the parent has closed the pipe


class _Sent:
    """The batches that arrive. Each one's memory is its own until it has been answered."""

    yields_fresh = True

    def __init__(self, pipe: Connection, slots: SharedSlots | None) -> None:
        self._pipe, self._slots = pipe, slots

    def __iter__(self) -> Iterator[Batch]:
        while True:
            try:
                packed = self._pipe.recv()
            except EOFError:
                os._exit(0)
            if packed is None:
                return
            keys, layout, arrays = packed
            if layout is not None:
                assert self._slots is not None
                arrays = self._slots.get(layout)
            yield _unpacked(keys, *arrays)


def _packed(batch: Batch) -> tuple[Any, ...]:
    """Return a batch as arrays, which pickle faster than tensors."""
    sparse = batch.sparse
    tensors = (batch.dense, sparse.values(), sparse.offsets(), sparse.weights_or_none(), batch.labels)
    shares = None
    if is_shared(sparse):
        own = KeyedJagged.of(sparse)
        shares = own.stride_per_key(), {names: inverse.numpy() for names, inverse in own.groups.items()}
    return (list(sparse.keys()), shares, *(None if tensor is None else tensor.numpy() for tensor in tensors))


def _unpacked(keys: list[str], shares: Any, *arrays: np.ndarray | None) -> Batch:
    dense, values, offsets, weights, labels = (None if a is None else torch.from_numpy(a) for a in arrays)
    assert dense is not None and values is not None and labels is not None
    options = {}
    if shares is not None:
        options["strides"] = shares[0]
        options["inverse"] = {names: torch.from_numpy(inverse) for names, inverse in shares[1].items()}
    return Batch(dense, KeyedJagged(keys, values, offsets=offsets, weights=weights, **options), labels)
