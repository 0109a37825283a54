"""Trainers of one job: channels on which all ranks make the same calls in the same order, and the errors that end them."""

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


class PeerError(RuntimeError):
    """The ranks cannot go on together. The message says which rank, in which call, after how long, and what to do."""


def ranks_named(ranks: Collection[int]) -> str:
    *most, last = [str(rank) for rank in sorted(ranks)]
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def missing(waiting: int, absent: Collection[int], doing: str, seconds: float, timeout: float) -> str:
    """Return the message of rank `waiting` when others did not come."""
    who, one = ranks_named(absent) if absent else "the others", len(absent) == 1
    if seconds < 0.9 * timeout:
        gone = f"{who} {'is' if one else 'are'} gone"
        return f"{gone}: see the last lines printed there, if any (rank {waiting} was in {doing})"
    why = f"{'it hangs, or takes' if one else 'they hang, or take'} longer than {timeout:g} s; look at what is done"
    return f"rank {waiting} waited {seconds:.1f} s for {who} in {doing}: {why}, or set SKIRL_TIMEOUT higher"


def failed(rank: int, why: str) -> str:
    """Return the message of the others when a rank ended with an error of its own."""
    return why if why.startswith("rank ") else f"rank {rank} ended the job: {why}"


CHANNELS = ("start", "ids", "rows", "dense", "votes", "lookups")
"""One for each thread that communicates, "start" for agreements before those begin, "lookups" for what is on the host."""
ON_DEVICE = ("rows", "dense")
"""Channels whose tensors are on the rows' device. Tensors of the others are on the host, so these have `exchange`."""
OF_STEP = " of step "
NAMED_BY_STEP = ("rows", "dense", "lookups")
HEAD = np.dtype([("sequence", "<i8"), ("bytes", "<i8"), ("tag", "S96")])
"""The head of a message: the number of the exchange, the size of what follows, and what it is for."""


@dataclass
class ChannelTraffic:
    """Traffic of a channel, by rank. What a rank sends to itself is not counted, because it enters no network."""

    bytes_sent: list[int]
    calls: int = 0
    seconds: float = 0.0


Wait = Callable[[], None]
"""Waits until a call that was begun is done, or raises a PeerError."""
What = TypeVar("What")


class Swapping(Generic[What]):
    """A swap in progress. `send` must not change until `wait` has returned."""

    def __init__(self, channel: "Channel", done: Wait, out: What, send: What) -> None:
        self._channel, self._done, self._out, self._send = channel, done, out, send

    def wait(self) -> What:
        with self._channel.timed():
            self._done()
        return self._out


class Channel:
    """A channel on which one thread of each rank communicates with the same thread of all others. All must make the same
    calls in the same order; an exchange detects it if they do not. Tags, in errors and of exchanges, say what a call is
    for."""

    def __init__(self, name: str, peers: "Peers") -> None:
        self.name, self.peers, self.rank, self.size = name, peers, peers.rank, peers.size
        self.counters = ChannelTraffic([0] * self.size)
        self.step: int | None = None
        """The step that calls are for, as named in errors. None: no step."""
        self._sequence = 0
        self._issuing = threading.Lock()

    def exchange(self, messages: Sequence[NDArray[np.uint8]], tag: str = "") -> list[NDArray[np.uint8]]:
        """Send a message to each rank and return one from each. Their sizes are sent along."""
        import torch

        with self._issue("exchange", tag) as doing, self.timed():
            heads = np.zeros(self.size, HEAD)
            heads["sequence"], heads["tag"] = self._sequence, tag.encode()[: HEAD["tag"].itemsize]
            heads["bytes"] = [len(message) for message in messages]
            ours = torch.from_numpy(heads.view(np.uint8).reshape(self.size, -1))
            come = torch.empty_like(ours)
            self._begin(list(come), list(ours), doing)()
            outs = []
            for rank, head in enumerate(come.numpy().reshape(-1).view(HEAD)):
                if (head["sequence"], head["tag"]) != (self._sequence, heads[0]["tag"]):
                    self._fail(
                        f"rank {rank} is at exchange {head['sequence']} ({head['tag'].decode(errors='replace')}) where "
                        f"rank {self.rank} is in {doing}: all ranks have to make the same calls in the same order"
                    )
                outs.append(torch.empty(int(head["bytes"]), dtype=torch.uint8))
            self._begin(outs, [torch.tensor(message) for message in messages], doing)()
            return [out.numpy() for out in outs]

    def told(self, mine: Any, tag: str) -> list[Any]:
        """Send a JSON value to all ranks, and return the value of each."""
        text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
        return [json.loads(said.tobytes()) for said in self.exchange([text] * self.size, tag)]

    def begin_swap(
        self, send: "Tensor", send_counts: Sequence[int], receive_counts: Sequence[int], tag: str = ""
    ) -> "Swapping[Tensor]":
        """Begin to send a slice of a tensor to each rank, and to receive one from each, of sizes that are known beforehand.
        `send` is contiguous, the vectors for rank 0 first. `wait()` of what this returns gives those of all, in order."""
        with self._issue("swap", tag) as doing, self.timed():
            out = send.new_empty((int(sum(receive_counts)), *send.shape[1:]))
            outs, parts = (
                list(whole.split([int(n) for n in counts]))
                for whole, counts in ((out, receive_counts), (send, send_counts))
            )
            return Swapping(self, self._begin(outs, parts, doing), out, send)

    def begin_swap_parts(
        self, parts: "Sequence[Tensor]", outs: "Sequence[Tensor]", tag: str = ""
    ) -> "Swapping[Sequence[Tensor]]":
        """Begin to do as `begin_swap`, with separate contiguous tensors, which must not change until `wait()` returns."""
        with self._issue("swap", tag) as doing, self.timed():
            return Swapping(self, self._begin(list(outs), list(parts), doing), outs, parts)

    def _begin(self, outs: "list[Tensor]", parts: "list[Tensor]", doing: str) -> Wait:
        for rank, (part, out) in enumerate(zip(parts, outs, strict=True)):
            if rank != self.rank:
                self.counters.bytes_sent[rank] += part.nbytes
            elif part.data_ptr() != out.data_ptr():
                out.copy_(part)
        return self._move(outs, parts, doing)

    def _move(self, outs: "list[Tensor]", parts: "list[Tensor]", doing: str) -> Wait:
        """Begin to move parts between ranks. A lone one has nothing to move."""
        return lambda: None

    def _fail(self, why: str) -> NoReturn:
        self.peers.fail(why)
        raise PeerError(why)

    @contextmanager
    def _issue(self, verb: str, tag: str) -> Iterator[str]:
        """Number a call, and yield a description of it for errors."""
        if not self._issuing.acquire(blocking=False):
            raise RuntimeError(
                f"two threads talk over channel {self.name} at once: give each thread a channel of its own"
            )
        try:
            self._sequence += 1
            of_step = "" if self.step is None else f"{OF_STEP}{self.step:,}"
            of_step += ", ahead of the loop" * bool(of_step and self.name == "ids")
            doing = f"channel {self.name}, {verb} {self._sequence}{f' ({tag})' if tag else ''}{of_step}"
            self.counters.calls += 1
            yield doing
        finally:
            self._issuing.release()

    @contextmanager
    def timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.counters.seconds += time.perf_counter() - began


class Peers:
    """One trainer's access to all trainers of its job. Use it in a with-block: leaving that with an error ends all ranks."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}: set it to seconds above 0")
        self.rank, self.size, self.timeout = rank, size, timeout
        self.near = size  # of the same machine
        self.channels: dict[str, Channel] = {}

    def channel(self, name: str) -> Channel:
        return self.channels[name]

    def comes(self, step: int) -> None:
        """Set the step that the loop's next calls are for, which errors name."""
        for name in NAMED_BY_STEP:
            self.channels[name].step = step

    @property
    def over(self) -> str | None:
        """Why the job is over. None while it goes on."""
        return None

    def fail(self, error: BaseException | str) -> None:
        """End all ranks because of an error of this one. Calls of the others raise a PeerError with its message."""

    def close(self) -> None:
        pass

    def counted(self) -> dict[str, dict[str, Any]]:
        return {name: asdict(channel.counters) for name, channel in self.channels.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if error is None:
            self.close()
        else:
            self.fail(error)


def said_of(error: BaseException | str) -> str:
    """Return the text of an error that the other ranks repeat."""
    if isinstance(error, KeyboardInterrupt):
        return "it was stopped by Ctrl-C"
    sentence = isinstance(error, ValueError | OSError) or type(error).__module__.startswith("skirl.")
    if sentence and str(error):
        return str(error)
    return error if isinstance(error, str) else repr(error)


class Alone(Peers):
    def __init__(self) -> None:
        super().__init__(0, 1, float("inf"))
        self.channels.update((name, Channel(name, self)) for name in CHANNELS)
