"""The order in which the shards of a step are summed: one binary tree over them, whichever trainer computes which.
Leaves are numbered from the left. A leaf with nothing to add is skipped; its sibling moves up unchanged."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def check_shards(shards: int) -> None:
    if shards < 1 or shards & (shards - 1):
        below = 1 << max(0, shards.bit_length() - 1) if shards > 0 else 1
        raise ValueError(f"shards is {shards}: set it to a power of two, such as {below} or {2 * below}")


def leaves(micros: int, shards: int = 1) -> list[int]:
    """Return the leaf of each micro-batch of a step. Each shard has a subtree of its own."""
    each = micros // shards
    return [leaves_of(range(shard, shard + 1), each).start + i for shard in range(shards) for i in range(each)]


def leaves_of(shards: range, micros: int) -> range:
    width = 1 << max(0, micros - 1).bit_length()
    return range(shards.start * width, shards.stop * width)


def block_of(rank: int, size: int, shards: int) -> range:
    """Return the contiguous shards of a rank. All ranks have the same number if `size` divides `shards`."""
    return range(rank * shards // size, (rank + 1) * shards // size)


def subtrees(begin: int, end: int) -> list[range]:
    """Split a block of leaves into the fewest whole subtrees. Their sums are all that other ranks need from it.

    >>> subtrees(0, 4), subtrees(3, 8)
    ([range(0, 4)], [range(3, 4), range(4, 8)])
    """
    found = []
    while begin < end:
        size = begin & -begin or 1 << end.bit_length()
        while begin + size > end:
            size //= 2
        found.append(range(begin, begin + size))
        begin += size
    return found


class BlockSum(Generic[T]):
    """Sums the parts of a block of leaves in the tree's order: one sum for each whole subtree in it, which is all that
    other ranks need. Of each it holds at most log2(leaves) + 2 partial sums."""

    def __init__(self, block: range, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._trees: list[tuple[range, list[tuple[int, T]]]] = [
            (part, []) for part in subtrees(block.start, block.stop)
        ]

    def take(self, leaf: int, part: T) -> None:
        """Add the part of a leaf, or of the subtree that begins there. It must be to the right of all previous ones."""
        parts = next(parts for leaves, parts in self._trees if leaf in leaves)
        # Two parts that meet lower than where the new leaf joins them are complete: nothing more comes between them.
        while len(parts) > 1 and _meet(parts[-2][0], parts[-1][0]) < _meet(parts[-1][0], leaf):
            self._join(parts)
        parts.append((leaf, part))

    def totals(self) -> list[tuple[int, T]]:
        """Return the first leaf and the sum of each subtree that has a part, and start anew."""
        for _, parts in self._trees:
            while len(parts) > 1:
                self._join(parts)
        return [(leaves.start, parts.pop()[1]) for leaves, parts in self._trees if parts]

    def _join(self, parts: list[tuple[int, T]]) -> None:
        right = parts.pop()[1]
        leaf, left = parts[-1]
        parts[-1] = leaf, self._add(left, right)


def tree_sum(parts: Iterable[tuple[int, T]], add: Callable[[T, T], T]) -> T | None:
    sums = BlockSum(range(1 << 32), add)
    for leaf, part in parts:
        sums.take(leaf, part)
    return next((total for _, total in sums.totals()), None)


def add_lists(left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
    """Add each tensor on the right to that on the left, in place. None stands for a tensor that is not there."""
    both = zip(left, right, strict=True)
    return [a if b is None else b if a is None else a.add_(b) for a, b in both]


def _meet(a: int, b: int) -> int:
    return (a ^ b).bit_length()
