"""The messages with which ranks end when another one is gone, hangs, failed, or makes other calls."""

from collections.abc import Collection


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
