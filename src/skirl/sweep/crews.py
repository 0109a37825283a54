"""A sweep in several processes: each trains some of the variants, and all advance step by step.

Threads of one process would wait for each other where steps are short. Each process reads the stream and plans for itself.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from skirl.engine.capacity import AUTO, DoesNotFit
from skirl.peers.processes import die_with_parent
from skirl.store import inside
from skirl.sweep.crew import Crew, Duty, Stepped
from skirl.sweep.variants import Varied
from skirl.tools.machine import cores, free_bytes
from skirl.train.loop import touched_rows
from skirl.train.recipe import Recipe

POSSIBLE = sys.platform == "linux"
"""On other systems, a forked process that has imported torch may hang."""
WORTH = 1 << 21
"""Least work that is worth several processes, in samples times variants; each step counts `_OF_A_STEP` samples more."""
FEWEST = 2
"""Fewest variants a process trains on average: reading and planning take as long as training two tiny models."""
_OF_A_STEP = 512
"""Number of samples whose training takes as long as the fixed work of a step."""
_END, _STOP = None, "stop"
"""Orders to end: after the last step, and after an error."""
_BRIEFLY = 10.0
"""Seconds that a process has to end after Ctrl-C."""
_PATIENCE = 60.0
"""Seconds that a process has to write its rows to its stores after an error elsewhere."""


class CrewDied(RuntimeError): ...


def how_many(asked: int | str, recipe: Recipe, variants: int, *, trace: bool) -> int:
    on_cpu = recipe.device.device == "cpu"
    if asked != "auto":
        if int(asked) > 1 and (why := _only_one(on_cpu, trace=trace)):
            raise ValueError(f"processes is {asked}, and {why}: set processes to 1")
        return min(int(asked), variants)
    if _only_one(on_cpu, trace=trace):
        return 1
    steps = recipe.stream().steps or recipe.data.steps
    if steps is not None and steps * variants * (recipe.data.batch + _OF_A_STEP) < WORTH:
        return 1
    return max(1, min(cores() // (recipe.device.threads or 1), variants // FEWEST))


def _only_one(on_cpu: bool, *, trace: bool) -> str | None:
    if not POSSIBLE:
        return "only Linux can copy a process that has imported torch"
    if not on_cpu:
        return "one process has the device"
    if multiprocessing.current_process().daemon:
        return "this process is a daemon of multiprocessing, which may not start others"
    return "a timeline is of one process" if trace else None


def dealt(variants: Sequence[Varied], count: int) -> list[list[Varied]]:
    """Assign variants to processes, the widest in turn, so that all take about as long."""
    order = sorted(range(len(variants)), key=lambda n: -_numbers(variants[n]))
    return [[variants[n] for n in sorted(order[first::count])] for first in range(count)]


def _numbers(variant: Varied) -> int:
    return variant.recipe.row_optimizer().width(variant.recipe.model.row_dim)


def duties(duty: Duty, count: int) -> list[Duty]:
    """Split a duty over processes: its variants and, if it is given in bytes, its cache."""
    recipe = duty.recipe
    if recipe.counts_first:
        here = replace(recipe, data=replace(recipe.data, workers=0))  # workers would be inherited by the copies
        size = str(recipe.cache_size(touched_rows(here)))
        recipe = replace(recipe, cache=replace(recipe.cache, cache=size))
    kind, amount = recipe.cache.parsed()
    total = sum(map(_numbers, duty.variants))
    split = []
    for own in dealt(duty.variants, count):
        cache = recipe.cache.cache
        if kind in ("bytes", "auto"):
            whole = amount if kind == "bytes" else AUTO * free_bytes()
            cache = f"{int(whole * sum(map(_numbers, own)) / total)}B"
        store = inside(recipe.cache.store, f"process-{len(split)}")
        own_recipe = replace(recipe, cache=replace(recipe.cache, cache=cache, store=store))
        split.append(replace(duty, variants=own, recipe=own_recipe))
    return split


def _of_all(name: str) -> Callable[..., Any]:
    """Return a method that calls the one of each Crew that has variants, and joins what these tell by variant."""

    def call(crews: "Crews", *args: Any, **more: Any) -> Any:
        found = crews.ask(crews._live, name, *args, **more)
        if found and not isinstance(found[0], dict):
            return found[0]
        return {key: of for one in found for key, of in one.items()}

    return call


class Crews:
    """Take the place of a Crew, with one in each of several processes, which are forked from this one in a with-block."""

    def __init__(self, own: Sequence[Duty]) -> None:
        self._own = list(own)
        self._team: list[_Process] = []

    def __enter__(self) -> "Crews":
        try:
            for duty in self._own:
                self._team.append(_Process(duty, [one.pipe for one in self._team]))
            self._answers(self._team)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        late: BaseException | None = None
        try:
            for one in self._team:
                one.order(_END if error is None else _STOP)
            until = time.monotonic() + (_PATIENCE if isinstance(error, Exception) else _BRIEFLY)
            for one in self._team:
                try:
                    one.answer() if error is None else one.ended(until)
                except Exception as found:
                    late = late or found
        finally:  # a second Ctrl-C does not wait
            for one in self._team:
                one.end()
            self._team = []
        if late is not None and error is None:
            raise late

    begin = _of_all("begin")
    evaluate = _of_all("evaluate")
    end_step = _of_all("end_step")
    aucs = _of_all("aucs")
    save = _of_all("save")
    finish = _of_all("finish")
    window = _of_all("window")

    def step(self) -> Stepped | None:
        found = self.ask(self._live, "step")
        if len({one is not None and one.last for one in found}) > 1 or None in found:
            if any(one is not None for one in found):
                raise RuntimeError("the data ended in one process of the sweep and not in another: did files change?")
            return None
        losses = {name: loss for one in found for name, loss in one.losses.items()}
        saving = any(one.saving for one in found)
        return Stepped(found[0].step, losses, found[0].samples, saving, found[0].unseen, found[0].last)

    def leave(
        self, why: Mapping[str, str], more: Mapping[str, Mapping[str, Any]] | None = None, *, save: Path | None = None
    ) -> dict[str, dict[str, Any]]:
        """As `Crew.leave`. A crew that has no variants left stops training."""
        results: dict[str, dict[str, Any]] = {}
        for one in self._team:
            if own := {name: reason for name, reason in why.items() if name in one.racing}:
                results |= self.ask([one], "leave", own, more, save=save)[0]
                one.racing -= set(own)
        return results

    def wait_saved(self) -> None:
        self.ask(self._team, "wait_saved")

    def confirm(self) -> None:
        self.ask(self._team, "confirm")

    def facts(self) -> dict[str, float]:
        found = self.ask(self._team, "facts")
        return {name: sum(one[name] for one in found) for name in found[0]}

    @property
    def _live(self) -> "list[_Process]":
        return [one for one in self._team if one.racing]

    def ask(self, team: "Sequence[_Process]", name: str, *args: Any, **more: Any) -> list[Any]:
        for one in team:
            one.order((name, args, more))
        return self._answers(team)

    def _answers(self, team: "Sequence[_Process]") -> list[Any]:
        """Return the answer of each process. Once all have answered, raise the first error."""
        found: list[Any] = []
        failed: BaseException | None = None
        for one in team:
            try:
                found.append(one.answer())
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise self._of_whole(failed)
        return found

    def _of_whole(self, error: Exception) -> Exception:
        """Return the error in terms of the whole sweep: a process knows only its own share of the cache."""
        if not isinstance(error, DoesNotFit) or not error.in_bytes:
            return error
        numbers = [sum(map(_numbers, duty.variants)) for duty in self._own]
        enough = -(-error.enough * sum(numbers) // min(numbers))
        return DoesNotFit(f"{error.found} in one of {len(numbers)} processes, which share the cache", enough, True)


class _Process:
    """One process, and the pipe to it."""

    def __init__(self, duty: Duty, others: Sequence[Connection]) -> None:
        self.racing = {variant.name for variant in duty.variants}
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self._process: Any = context.Process(
            target=_work, args=(duty, theirs, [self.pipe, *others], os.getpid()), daemon=False, name="skirl-crew"
        )
        with warnings.catch_warnings():  # Python 3.12 warns about threads, here those of Arrow
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def order(self, what: Any) -> None:
        with suppress(OSError):  # it has ended: its answer says so
            self.pipe.send(what)

    def answer(self) -> Any:
        try:
            good, found = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join(5.0)
            names = ", ".join(sorted(self.racing)) or "no variant any more"
            raise CrewDied(
                f"a process of the sweep, with {names}, ended by itself (exit code {self._process.exitcode}): is there "
                "enough memory? Go on with --resume where the sweep is saved; --processes 1 takes the least memory"
            ) from None
        if not good:
            raise found
        return found

    def ended(self, until: float) -> None:
        """Wait until the process has ended, and kill it if that takes too long. Drop answers that nobody waits for."""
        with suppress(EOFError, OSError):
            while self.pipe.poll(max(0.0, until - time.monotonic())):
                self.pipe.recv()

    def end(self) -> None:
        self.pipe.close()
        self._process.kill()  # it is done or will never be, and it ignores SIGTERM
        self._process.join()
        self._process.close()


def _work(duty: Duty, pipe: Connection, others: Sequence[Connection], parent: int) -> None:
    """Carry out orders until the order to end. This is the body of a crew's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles both
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(parent)  # so that whoever resumes finds the stores free
    for other in others:  # or nobody would notice when they close
        other.close()
    _forget_forkserver()
    torch.set_num_threads(duty.recipe.device.threads or 1)
    try:
        try:
            with Crew(duty) as crew:
                _send(pipe, (True, None))
                while (order := _received(pipe)) is not _END:
                    if order == _STOP:
                        raise _Stopped
                    _send(pipe, _carried_out(crew, order))
            answer = (True, None)
        except Exception as error:
            answer = (False, _sendable(error))
        _send(pipe, answer)
    except _Gone:
        os._exit(1)


class _Stopped(Exception):
    """The sweep has failed in another process."""


class _Gone(BaseException):
    """The parent process is gone."""


def _received(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        raise _Gone from None


def _send(pipe: Connection, answer: tuple[bool, Any]) -> None:
    try:
        pipe.send(answer)
    except OSError:
        raise _Gone from None


def _forget_forkserver() -> None:
    """Let this process start its own server for readers: it cannot wait for that of its parent."""
    server: Any = forkserver._forkserver  # of the standard library, which has no other way
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None


def _carried_out(crew: Crew, order: tuple[str, tuple[Any, ...], dict[str, Any]]) -> tuple[bool, Any]:
    name, args, more = order
    try:
        return True, getattr(crew, name)(*args, **more)
    except Exception as error:
        return False, _sendable(error)


def _sendable(error: BaseException) -> BaseException:
    """Return the error, or one with its text if it cannot be sent."""
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):  # of this process itself
            return error
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
