"""What training takes batches from: one interface for files and for synthetic streams."""

from collections.abc import Iterator
from typing import Any, ClassVar, Protocol, runtime_checkable

from skirl.core.batch import Batch
from skirl.core.tables import Table


@runtime_checkable
class Source(Protocol):
    """An iterable of batches that knows what they need and where it is. A pass is the whole run: all epochs in a row.

    >>> from skirl.data import Synthetic
    >>> isinstance(Synthetic("tiny"), Source)
    True
    """

    yields_fresh: ClassVar[bool]
    """Each batch has memory of its own."""

    @property
    def dense_features(self) -> int:
        """Columns of `Batch.dense`."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """What is predicted; `Batch.labels` is [batch], or [batch, labels] where there is more than one."""
        ...

    @property
    def lists(self) -> tuple[str, ...]:
        """The features with any number of ids a sample, not exactly one."""
        ...

    @property
    def samples(self) -> int | None:
        """Samples of a whole pass, of all trainers, where that is known before it is over."""
        ...

    @property
    def steps(self) -> int | None:
        """Steps of a whole pass: its batches, or rounds of a `dealt` one; None until they are known, at the latest when the
        last one is yielded."""
        ...

    @property
    def left_out(self) -> int:
        """Samples at the end of the last epoch that were no whole batch, where batches have shards: they are left out."""
        ...

    @property
    def held_out(self) -> "Source | None":
        """The samples set apart to evaluate on: one pass over them, in order; None where none are."""
        ...

    def held_out_at(self, state: Any) -> "Source | None":
        """The same, as a run sees them that is at a state: an open vocabulary is read ahead, and has grown since.

        **Arguments**

        - `state`: what `state_dict` returned then.
        """
        ...

    @property
    def bad_rows(self) -> int:
        """Malformed rows left out so far, in this process."""
        ...

    @property
    def first_bad_row(self) -> str | None:
        """Where the first of them is, as an error would say it."""
        ...

    def sharded(self, first: int, last: int, of: int) -> "Source":
        """The same stream, of each batch only shards first .. last - 1 of `of`: a micro-batch each, for `lookahead`.

        Shard v of a batch of B samples is samples v * B / of to before (v + 1) * B / of. A smaller last batch of an epoch is
        left out; with one shard it is not, and nothing changes. A place in the stream counts whole batches, and is the same
        for any shards.

        **Arguments**

        - `first`, `last`: the first shard, and the one after the last; `skirl.data.share.block` says which are a trainer's.
        - `of`: shards of a batch, a divisor of its samples.
        """
        ...

    def dealt(self, rank: int, ranks: int) -> "Source":
        """The same stream, only every `ranks`-th batch from `rank` on: what one of several trainers evaluates on.

        All ranks get equally many: in the last round, the batch of a rank beyond the end has no samples.

        **Arguments**

        - `rank`, `ranks`: which trainer of how many.
        """
        ...

    def tables(self, dim: int) -> list[Table]:
        """The tables that the ids look rows up in.

        **Arguments**

        - `dim`: numbers in a row of each.
        """
        ...

    def __iter__(self) -> Iterator[Batch]:
        """One pass; the first after `load_state_dict` goes on where that state was taken."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where the pass is, counting the batches handed out, and what stream it is."""
        ...

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse what is no state of this stream, saying what differs; nothing else happens.

        **Arguments**

        - `state`: what `state_dict` returned.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass go on where a state was taken.

        **Arguments**

        - `state`: what `state_dict` returned; refused when it is another stream's.
        """
        ...
