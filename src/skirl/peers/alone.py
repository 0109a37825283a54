"""A single trainer: every call returns what it was given, without torch.distributed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from numpy.typing import NDArray

from skirl.peers.base import CHANNELS, BegunCall, Channel, Peers
from skirl.peers.errors import PeerError

if TYPE_CHECKING:
    from torch import Tensor


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
