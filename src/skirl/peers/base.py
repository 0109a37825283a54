"""Trainers of one job: channels on which all ranks make the same calls in the same order, and the errors that end them."""

import json
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from skirl.peers.message import ALIGNED, HEAD, KINDS, heads, padded, read_head

if TYPE_CHECKING:
    from torch import Tensor


class PeerError(RuntimeError):
    """The ranks cannot go on together. The message says which rank, in which call, after how long, and what to do."""


def ranks_named(ranks: Collection[int]) -> str:
    """Name ranks as in a sentence.

    >>> ranks_named([2]), ranks_named([0, 3, 5])
    ('rank 2', 'ranks 0, 3 and 5')
    """
    *most, last = [str(rank) for rank in sorted(ranks)]
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def missing(waiting: int, absent: Collection[int], doing: str, seconds: float, patience: float) -> str:
    """Return the message of rank `waiting` when others did not come.

    >>> print(missing(0, [1], "channel rows, swap 7 (values of step 3)", 5.0, 5.0))  # doctest: +NORMALIZE_WHITESPACE
    rank 0 waited 5.0 s for rank 1 in channel rows, swap 7 (values of step 3): it hangs, or takes longer than patience=5;
    look at what it does, or set patience higher
    >>> print(missing(0, [1, 2], "channel ids, exchange 2", 0.1, 600.0))  # doctest: +NORMALIZE_WHITESPACE
    rank 0 waited 0.1 s for ranks 1 and 2 in channel ids, exchange 2: gone; see the last lines that ranks 1 and 2 printed,
    and start the job again: it resumes from its last checkpoint
    """
    who = ranks_named(absent) if absent else "the others"
    if seconds >= 0.9 * patience:
        it = "it hangs, or takes" if len(absent) == 1 else "they hang, or take"
        does = "it does" if len(absent) == 1 else "they do"
        why = f"{it} longer than patience={patience:g}; look at what {does}, or set patience higher"
    else:
        why = (
            f"gone; see the last lines that {who} printed, and start the job again: it resumes from its last checkpoint"
        )
    return f"rank {waiting} waited {seconds:.1f} s for {who} in {doing}: {why}"


def over(why: str) -> str:
    """Return the message of a later call on a rank that has ended the job itself.

    >>> print(over("rank 1 ended the job: enough (in step 4)"))  # doctest: +NORMALIZE_WHITESPACE
    rank 1 ended the job: enough (in step 4); the job is over for all trainers: to end a loop on purpose, break where
    batches.ends_step is true, after the same step on all
    """
    then = "to end a loop on purpose, break where batches.ends_step is true, after the same step on all"
    return f"{why}; the job is over for all trainers: {then}"


def failed(rank: int, why: str) -> str:
    """Return the message of the others when a rank ended with an error of its own.

    >>> failed(1, "id 7 of table 'user' is out of range")
    "rank 1 ended the job: id 7 of table 'user' is out of range"
    """
    return why if why.startswith("rank ") else f"rank {rank} ended the job: {why}"


CHANNELS = ("start", "ids", "rows", "dense", "votes", "lookups")
"""One for each thread that communicates, "start" for agreements before those begin, "lookups" for what is on the host."""
ON_DEVICE = ("rows", "dense")
"""Channels whose tensors are on the rows' device. Tensors of the others are on the host, so these have `exchange`."""
OF_STEP = " of step "
NAMED_BY_STEP = ("rows", "dense", "lookups")
"""Channels that serve the loop's present step, which their errors name."""
LIMIT = 1 << 30
"""Most bytes of one message of an exchange."""


@dataclass
class ChannelTraffic:
    """Traffic of a channel, by rank. What a rank sends to itself is not counted, because it enters no network."""

    calls: int = 0
    seconds: float = 0.0
    """Seconds that the thread waited in calls."""
    sent: list[int] = field(default_factory=list)
    """Number of vectors sent to each rank by swaps."""
    received: list[int] = field(default_factory=list)
    """Number of vectors received from each rank by swaps."""
    bytes_sent: list[int] = field(default_factory=list)
    """Bytes sent to each rank by all calls."""
    bytes_received: list[int] = field(default_factory=list)
    """Bytes received from each rank by all calls."""

    @classmethod
    def of(cls, size: int) -> Self:
        """Return the counters of an unused channel."""
        return cls(0, 0.0, [0] * size, [0] * size, [0] * size, [0] * size)


class BegunCall(Protocol):
    """A call that was begun."""

    def wait(self) -> None:
        """Wait until it is done, or raise a PeerError."""
        ...


What = TypeVar("What")


class Swapping(Generic[What]):
    """A swap in progress. `send` must not change until `wait` has returned."""

    def __init__(self, channel: "Channel", work: BegunCall, out: What, send: What) -> None:
        self._channel, self._work, self._out, self._send = channel, work, out, send

    def wait(self) -> What:
        """Wait for the swap, and return the parts of all ranks, in the order of ranks."""
        with self._channel.timed():
            self._work.wait()
        return self._out


class Channel(ABC):
    """A channel on which one thread of each rank communicates with the same thread of all others.

    All ranks must make the same calls in the same order; an exchange detects it if they do not. Tags say what a call is
    for: in errors, and in an exchange also on the wire.
    """

    limit = LIMIT

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.counters = ChannelTraffic.of(size)
        self.step: int | None = None
        """The step that calls are for, as named in errors. None: no step."""
        self._sequence = 0
        self._issuing = threading.Lock()

    def exchange(self, arrays: Sequence[NDArray], tag: str = "") -> list[NDArray]:
        """Send an array to each rank and return one from each. Their sizes and dtypes are sent along."""
        with self._issue("exchange", tag, len(arrays)) as doing, self.timed():
            for rank, array in enumerate(arrays):
                if array.ndim != 1 or array.dtype.kind not in KINDS:
                    raise ValueError(
                        f"the array for rank {rank} has {array.ndim} dimensions of {array.dtype}: pass a one-dimensional "
                        "array of numbers"
                    )
                if array.nbytes > self.limit:
                    self._fail(f"rank {self.rank} has {array.nbytes:,} bytes for rank {rank} in {doing}, and {self.limit:,} "
                               "is the most: use smaller batches, or fewer of them ahead")  # fmt: skip
            return self._exchange(arrays, tag, doing)

    def _exchange(self, arrays: Sequence[NDArray], tag: str, doing: str) -> list[NDArray]:
        import torch

        ones = [1] * self.size
        ours = torch.from_numpy(heads(arrays, self._sequence, tag))
        theirs = torch.empty_like(ours)
        self._counted(ours, ones, ones)
        self._moved(_split(theirs, ones), _split(ours, ones), doing).wait()
        expected = tag.encode()[: HEAD["tag"].itemsize].decode(errors="replace")
        come = []
        for rank, raw in enumerate(theirs.numpy()):
            try:
                head = read_head(raw)
            except ValueError as wrong:
                self._fail(f"rank {rank} sent rank {self.rank} no message in {doing}: {wrong}")
            if (head.sequence, head.tag) != (self._sequence, expected):
                self._fail(
                    f"rank {rank} is at exchange {head.sequence} ({head.tag}) where rank {self.rank} is in {doing}: "
                    "all ranks have to make the same calls in the same order"
                )
            if head.bytes > self.limit:
                self._fail(
                    f"rank {rank} sends rank {self.rank} {head.bytes:,} bytes in {doing}, and {self.limit:,} is the most"
                )
            come.append(head)
        send = torch.zeros(sum(padded(array.nbytes) for array in arrays) // ALIGNED, ALIGNED, dtype=torch.uint8)
        flat, at = send.numpy().reshape(-1), 0
        for array in arrays:
            flat[at : at + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
            at += padded(array.nbytes)
        send_counts = [padded(array.nbytes) // ALIGNED for array in arrays]
        receive_counts = [padded(head.bytes) // ALIGNED for head in come]
        out = torch.empty(sum(receive_counts), ALIGNED, dtype=torch.uint8)
        self._counted(send, send_counts, receive_counts)
        self._moved(_split(out, receive_counts), _split(send, send_counts), doing).wait()
        whole, at, parts = out.numpy().reshape(-1), 0, []
        for head in come:
            parts.append(whole[at : at + head.bytes].view(head.dtype))
            at += padded(head.bytes)
        return parts

    def told(self, mine: Any, tag: str) -> list[Any]:
        """Send a JSON value to all ranks, and return the value of each."""
        text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
        return [json.loads(said.tobytes()) for said in self.exchange([text] * self.size, tag)]

    def begin_swap(
        self, send: "Tensor", send_counts: Sequence[int], receive_counts: Sequence[int], tag: str = ""
    ) -> "Swapping[Tensor]":
        """Begin to send a slice of a tensor to each rank, and to receive one from each, of sizes that are known beforehand.

        Call `wait()` on what this returns to get the slices from all, in the order of ranks.

        **Arguments**

        - `send`: [sum of send_counts, ...], contiguous: the vectors for rank 0, then those for rank 1, and so on.
        - `send_counts`: how many vectors go to each rank; any may be 0.
        - `receive_counts`: how many come from each: that rank's entry for this one in its `send_counts`.
        - `tag`: what the call is for.
        """
        send_counts, receive_counts = [int(n) for n in send_counts], [int(n) for n in receive_counts]
        with self._issue("swap", tag, len(send_counts)) as doing, self.timed():
            if len(receive_counts) != self.size or min(send_counts + receive_counts) < 0:
                raise ValueError(f"{doing}: the counts are {send_counts} and {receive_counts}, for {self.size} ranks")
            if len(send) != sum(send_counts) or not send.is_contiguous():
                raise ValueError(
                    f"{doing}: send is {tuple(send.shape)} with counts {send_counts}, and has to be contiguous"
                )
            out = send.new_empty((sum(receive_counts), *send.shape[1:]))
            self._counted(send, send_counts, receive_counts, vectors=True)
            return Swapping(self, self._moved(_split(out, receive_counts), _split(send, send_counts), doing), out, send)

    def begin_swap_parts(
        self, parts: "Sequence[Tensor]", outs: "Sequence[Tensor]", tag: str = ""
    ) -> "Swapping[Sequence[Tensor]]":
        """Begin to do as `begin_swap`, with separate tensors; this rank's own part is not copied.

        Call `wait()` on what this returns to get the result; `parts` must not change until then."""
        with self._issue("swap", tag, len(parts)) as doing, self.timed():
            if len(outs) != self.size or not all(tensor.is_contiguous() for tensor in (*parts, *outs)):
                raise ValueError(f"{doing}: give {self.size} outs, and contiguous ones")
            for rank, (part, out) in enumerate(zip(parts, outs)):
                if rank != self.rank:
                    self.counters.bytes_sent[rank] += part.nbytes
                    self.counters.bytes_received[rank] += out.nbytes
            return Swapping(self, self._move(list(outs), list(parts), doing), outs, parts)

    def _moved(self, outs: "list[Tensor]", parts: "list[Tensor]", doing: str) -> BegunCall:
        """Begin to move parts, and copy this rank's own."""
        work = self._move(outs, parts, doing)
        outs[self.rank].copy_(parts[self.rank])
        return work

    @abstractmethod
    def _move(self, outs: "list[Tensor]", parts: "list[Tensor]", doing: str) -> BegunCall:
        """Begin to send a part to each other rank, and to receive one from each."""

    @abstractmethod
    def _fail(self, why: str) -> NoReturn:
        """End all ranks: tell the others, and raise a PeerError."""
        raise NotImplementedError

    @contextmanager
    def _issue(self, verb: str, tag: str, parts: int) -> Iterator[str]:
        """Number a call, and yield a description of it for errors."""
        if not self._issuing.acquire(blocking=False):
            raise RuntimeError(
                f"two threads talk over channel {self.name} at once: give each thread a channel of its own"
            )
        try:
            self._sequence += 1
            of_step = "" if self.step is None else f"{OF_STEP}{self.step:,}"
            doing = f"channel {self.name}, {verb} {self._sequence}{f' ({tag})' if tag else ''}{of_step}"
            if parts != self.size:
                raise ValueError(f"{doing}: there are {parts} parts for {self.size} ranks")
            self.counters.calls += 1
            yield doing
        finally:
            self._issuing.release()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the seconds of a block as waiting."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.counters.seconds += time.perf_counter() - began

    def _counted(
        self, send: "Tensor", send_counts: list[int], receive_counts: list[int], vectors: bool = False
    ) -> None:
        """Count what is sent to and received from others."""
        now, each = self.counters, send.element_size() * math.prod(send.shape[1:])
        for rank in range(self.size):
            if rank != self.rank:
                now.bytes_sent[rank] += each * send_counts[rank]
                now.bytes_received[rank] += each * receive_counts[rank]
                if vectors:
                    now.sent[rank] += send_counts[rank]
                    now.received[rank] += receive_counts[rank]


def _split(whole: "Tensor", counts: list[int]) -> "list[Tensor]":
    """Split a tensor into one slice per rank."""
    return list(whole.split(counts))


class Peers(ABC):
    """One trainer's access to all trainers of its job. Use it in a with-block: leaving that with an error ends all ranks."""

    def __init__(self, rank: int, size: int, patience: float) -> None:
        if not patience > 0:
            raise ValueError(f"patience is {patience}: set it to seconds above 0")
        self.rank, self.size, self.patience = rank, size, patience

    @property
    @abstractmethod
    def channels(self) -> dict[str, Channel]:
        """All channels, by name."""

    def channel(self, name: str) -> Channel:
        """Return a channel, which one thread may use."""
        if name not in self.channels:
            raise ValueError(f"there is no channel {name!r}: take one of {', '.join(self.channels)}")
        return self.channels[name]

    def comes(self, step: int) -> None:
        """Set the step that the loop's next calls are for, which errors name."""
        for name in NAMED_BY_STEP:
            self.channels[name].step = step

    @property
    def near(self) -> int:
        """Number of trainers on this machine, this one included."""
        return self.size

    @property
    def over(self) -> str | None:
        """Why the job is over, as a further call would say it. None while the job goes on."""
        return None

    @abstractmethod
    def fail(self, error: BaseException | str) -> None:
        """End all ranks because of an error of this one. Calls of the others raise a PeerError with its message."""

    @abstractmethod
    def close(self) -> None:
        """Wait until all ranks leave, and leave."""

    def counted(self) -> dict[str, dict[str, Any]]:
        """Return the counters of each channel."""
        return {name: asdict(channel.counters) for name, channel in self.channels.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if error is None:
            self.close()
        else:
            self.fail(error)


def said_of(error: BaseException | str) -> str:
    """Return the text of an error that the other ranks repeat.

    >>> said_of(ValueError("id 7 is out of range")), said_of(KeyError("a"))
    ('id 7 is out of range', "KeyError('a')")
    """
    if isinstance(error, KeyboardInterrupt):
        return "it was stopped by Ctrl-C"
    sentence = isinstance(error, ValueError | OSError) or type(error).__module__.startswith("skirl.")
    if sentence and str(error):
        return str(error)
    return error if isinstance(error, str) else repr(error)


class Alone(Peers):
    """The only trainer of its job.

    >>> import numpy as np
    >>> with Alone() as peers:
    ...     peers.channel("ids").exchange([np.arange(3)])
    [array([0, 1, 2])]
    """

    def __init__(self) -> None:
        super().__init__(0, 1, float("inf"))
        self._channels = {name: _ToItself(name, 0, 1) for name in CHANNELS}

    @property
    def channels(self) -> dict[str, Channel]:
        return {**self._channels}

    def fail(self, error: BaseException | str) -> None:
        pass

    def close(self) -> None:
        pass


class _Done:
    """A call that is done already."""

    def wait(self) -> None:
        pass


class _ToItself(Channel):
    """A channel that delivers what is sent to the sender."""

    def _exchange(self, arrays: Sequence[NDArray], tag: str, doing: str) -> list[NDArray]:
        return [arrays[0]]

    def _move(self, outs: "list[Tensor]", parts: "list[Tensor]", doing: str) -> BegunCall:
        if outs[0].shape != parts[0].shape:
            raise ValueError(f"{doing}: {len(parts[0])} are sent to the only rank, and {len(outs[0])} expected of it")
        return _Done()

    def _fail(self, why: str) -> NoReturn:
        raise PeerError(why)
