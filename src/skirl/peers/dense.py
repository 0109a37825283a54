"""Sum the dense gradients of a step over its shards in a fixed order, so that no bit depends on the number of trainers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from skirl.core.tree import block_of, leaves_of, subtrees, tree_sum
from skirl.peers.base import Channel, Peers, Swapping

Gradients = Sequence[Tensor | None]


class OfAllTrainers:
    """Combines the trainers' sums over their blocks of leaves into the mean over all shards. Each trainer sums one piece of
    all gradients over the tree and sends it to all, which moves as many bytes as a ring. A step's buffers are kept for the
    next, because new memory must be mapped first."""

    def __init__(self, peers: Peers, shards: int, accumulate: int = 1) -> None:
        self._channel, self._scale = peers.channel("dense"), 1 / shards
        self._blocks = [leaves_of(block_of(rank, peers.size, shards), accumulate) for rank in range(peers.size)]
        self.mine = self._blocks[peers.rank]
        self._shapes: list[tuple[torch.dtype, torch.Size]] = []
        self._kinds: list[_Kind] = []

    @torch.no_grad()
    def mean(self, weights: Sequence[Tensor], totals: Sequence[tuple[int, Gradients]]) -> list[Tensor | None]:
        """Return the mean over all shards for each weight, or None for a weight that has no gradient anywhere."""
        if self._shapes != (shapes := [(weight.dtype, weight.shape) for weight in weights]):
            trees = [subtrees(block.start, block.stop) for block in self._blocks]
            kinds = sorted({dtype for dtype, _ in shapes}, key=str)
            places = [[n for n, (dtype, _) in enumerate(shapes) if dtype == kind] for kind in kinds]
            self._kinds = [_Kind(self._channel, of, [weights[n] for n in of], trees, self._scale) for of in places]
            self._shapes = shapes
        known, none = dict(totals), [None] * len(weights)
        parts = [known.get(leaves.start, none) for leaves in subtrees(self.mine.start, self.mine.stop)]
        sent = [kind.send(parts) for kind in self._kinds]
        shared = [kind.share(coming) for kind, coming in zip(self._kinds, sent)]
        found: list[Tensor | None] = [None] * len(weights)
        for kind, coming in zip(self._kinds, shared):
            coming.wait()
            kind.give(weights, parts, found)
        return found


class _Kind:
    """Weights of one dtype. A buffer has their gradients in order, followed by a flag for each that says if there is one."""

    def __init__(
        self, channel: Channel, places: list[int], weights: list[Tensor], trees: list[list[range]], scale: float
    ) -> None:
        self._channel, self._places, self._trees, self._scale = channel, places, trees, scale
        sizes = [weight.numel() for weight in weights]
        numbers, subtrees_here = sum(sizes), len(trees[channel.rank])
        piece = -(-(numbers + len(weights)) // channel.size)
        self._rows = weights[0].detach().new_zeros(subtrees_here, channel.size, piece)
        """The pieces for all ranks, for each of this trainer's subtrees. At the end, the first row has the means."""
        self._zero = self._rows.new_zeros(())
        flat = self._rows.view(subtrees_here, -1)
        self._views = [[v.view(w.shape) for v, w in zip(row[:numbers].split(sizes), weights)] for row in flat]
        self._there = flat[:, numbers : numbers + len(weights)]
        self._send = self._rows.transpose(0, 1).contiguous()  # the same memory if there is one subtree
        self._come = [self._rows.new_empty(len(tree), piece) for tree in trees]
        self._come[channel.rank] = self._send[channel.rank]

    def send(self, parts: Sequence[Gradients]) -> Swapping[Sequence[Tensor]]:
        for views, there, part in zip(self._views, self._there, parts, strict=True):
            grads = [part[n] for n in self._places]
            have = [grad is not None for grad in grads]
            there.fill_(1.0)
            if all(have):
                torch._foreach_copy_(views, [grad for grad in grads if grad is not None])
                continue
            there.copy_(torch.tensor(have))
            for view, grad in zip(views, grads):
                # adding -0 changes no sum, not even the sign of a zero
                view.fill_(-0.0) if grad is None else view.copy_(grad)
        if len(self._rows) > 1:
            self._send.copy_(self._rows.transpose(0, 1))
        return self._channel.begin_swap_parts(list(self._send), self._come, tag="partial sums of dense gradients")

    def share(self, coming: Swapping[Sequence[Tensor]]) -> Swapping[Sequence[Tensor]]:
        coming.wait()
        total = tree_sum(
            zip(
                (leaves.start for tree in self._trees for leaves in tree), (row for rows in self._come for row in rows)
            ),
            Tensor.add_,
        )
        assert total is not None
        whole = self._rows[0]
        mine = whole[self._channel.rank]
        torch.add(self._zero, total, alpha=self._scale, out=mine)  # 0 + total: no -0.0 tells of missing gradients
        return self._channel.begin_swap_parts([mine] * self._channel.size, list(whole), tag="sums of dense gradients")

    def give(self, weights: Sequence[Tensor], parts: Sequence[Gradients], found: list[Tensor | None]) -> None:
        """Put each mean where this trainer's gradient was, or in a new tensor if it had none."""
        for n in self._places:
            found[n] = next((part[n] for part in parts if part[n] is not None), None)
        if any(found[n] is None for n in self._places):  # else skip this, which waits for the device
            for n, there in zip(self._places, self._there[0].tolist()):
                if found[n] is None and there:
                    found[n] = torch.empty_like(weights[n])
        to = [(mean, view) for n, view in zip(self._places, self._views[0]) if (mean := found[n]) is not None]
        if to:
            torch._foreach_copy_([mean for mean, _ in to], [view for _, view in to])
