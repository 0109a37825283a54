"""The interface that training reads batches from, for files and synthetic streams alike."""

from collections.abc import Iterator
from typing import Any, ClassVar, Protocol, runtime_checkable

from skirl.core.batch import Batch
from skirl.core.tables import Table


@runtime_checkable
class Source(Protocol):
    """An iterable of batches that knows their tables and its own position. A pass is the whole run: all epochs in a row.

    A class that inherits from it holds nothing out, has no lists, and leaves nothing out, unless it says otherwise.

    >>> from skirl.data import Synthetic
    >>> isinstance(Synthetic("tiny"), Source)
    True
    """

    yields_fresh: ClassVar[bool]
    """True if each batch has its own memory."""

    @property
    def dense_features(self) -> int: ...

    @property
    def labels(self) -> tuple[str, ...]:
        """`Batch.labels` is [batch], or [batch, labels] if there is more than one."""
        ...

    @property
    def lists(self) -> tuple[str, ...]:
        """The features with any number of ids per sample instead of exactly one."""
        return ()

    @property
    def samples(self) -> int | None:
        """Samples of a whole pass over all trainers; None if that is not known in advance."""
        ...

    @property
    def steps(self) -> int | None:
        """Steps of a whole pass: its batches, or its rounds if it is `dealt`. None until the number is known, at the latest
        when the last one is yielded."""
        ...

    @property
    def held_out(self) -> "Source | None":
        """The samples held out for evaluation, as a source of one pass in order; None if there are none."""
        return None

    def held_out_at(self, state: Any) -> "Source | None":
        """Return the held-out samples as a run at `state` sees them: an open vocabulary, read ahead, has grown since."""
        return self.held_out

    @property
    def bad_rows(self) -> int:
        """Malformed rows that this process has left out so far."""
        return 0

    def sharded(self, first: int, last: int, of: int) -> "Source":
        """Return the same stream cut to shards first .. last - 1 of the `of` shards of each batch, a micro-batch each.

        With n = samples of a batch / of, shard v holds samples v * n .. (v + 1) * n - 1. A smaller last batch of an epoch is
        left out; with one shard it is not, and nothing changes. A position counts whole batches, so it fits any shards.
        """
        ...

    def dealt(self, rank: int, ranks: int) -> "Source":
        """Return the same stream with only every `ranks`-th batch from batch `rank` on: what one trainer evaluates on.

        All ranks get the same number: in the last round, a rank beyond the end gets a batch without samples.
        """
        ...

    def tables(self, dim: int) -> list[Table]: ...

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one pass. The first pass after `load_state_dict` continues where that state was taken."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the pass, counting the batches handed out, and the identity of the stream."""
        ...

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if `state` is not a state of this stream, saying what differs. Change nothing."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass continue where a state was taken. Raise if it is of another stream."""
        ...
