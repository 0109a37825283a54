"""Dense gradients of a step, summed over its shards in one order: their bits do not depend on the number of trainers."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from skirl.core.tree import BlockSum, block_of, check_shards, leaves_of, subtrees, tree_sum
from skirl.peers.base import Peers
from skirl.peers.errors import PeerError, ranks_named

_open: "WeakSet[Dense]" = WeakSet()
"""Those that hear of optimizers' steps."""


class Dense:
    """The dense gradients of all ranks. A step's are summed at the first `step()` of an optimizer, or by `reduce`.

    **Arguments**

    - `peers`: the ranks; the thread that calls this talks over their channels "dense" and, at first, "start".
    - `parameters`: those of the model that are no rows, in the same order on all ranks.
    - `shards`: that a step has.
    - `scale`: what the sum is multiplied with; 1/shards makes it the gradient of the mean loss.

    >>> import skirl.peers.in_process
    >>> def work(peers):
    ...     weight = torch.nn.Parameter(torch.zeros(2))
    ...     with Dense(peers, [weight], shards=2) as dense:
    ...         dense.begin()
    ...         weight.grad = torch.tensor([1.0, 10.0]) * (peers.rank + 1)
    ...         dense.reduce()
    ...     return weight.grad.tolist()
    >>> skirl.peers.in_process.InProcess.run(2, work)
    [[1.5, 15.0], [1.5, 15.0]]
    """

    def __init__(self, peers: Peers, parameters: Iterable[Tensor], *, shards: int, scale: float | None = None) -> None:
        check_shards(shards)
        if shards < peers.size:
            raise ValueError(
                f"{peers.size} trainers share {shards} shards: set shards to as many or more, a power of two"
            )
        self._peers, self._channel = peers, peers.channel("dense")
        self._parameters = list({id(weight): weight for weight in parameters}.values())
        self._known = {id(weight) for weight in self._parameters}
        self._scale = 1.0 / shards if scale is None else scale
        self._shards = shards
        self._blocks = [block_of(rank, peers.size, shards) for rank in range(peers.size)]
        self._mine = self._blocks[peers.rank]
        self._next = self._mine.start
        """The shard whose backward comes, or was the last."""
        self._reduced = False
        self._sums: list[_Sums] = []
        """For each kind of numbers, those of the step."""
        self._layout: tuple[int, ...] = ()
        _watch_optimizers()
        _open.add(self)
        self._scaler: Any = None

    def __enter__(self) -> "Dense":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let optimizers and the scaler be as they were."""
        _open.discard(self)
        if self._scaler is not None:
            for name in ("unscale_", "step"):
                self._scaler.__dict__.pop(name, None)
            self._scaler = None

    def begin(self) -> None:
        """A step begins: the next backward is of this rank's first shard."""
        self._next, self._reduced = self._mine.start, False
        for sums in self._sums:
            sums.begin()

    def next_shard(self) -> None:
        """The backward of a shard is done, and that of this rank's next one comes: take its gradients."""
        if self._next + 1 not in self._mine:
            raise RuntimeError(
                f"shard {self._next} is the last one of this trainer: call reduce(), or step an optimizer"
            )
        self._take()
        for weight in self._parameters:
            weight.grad = None
        self._next += 1

    def reduce(self) -> None:
        """Sum over all shards, into `.grad` of all parameters. Once a step; what comes after it that step does nothing."""
        if self._reduced:
            return
        if self._next + 1 != self._mine.stop:
            raise RuntimeError(
                f"gradients are summed after the last shard of a step, and {self._mine.stop - self._next - 1} of this "
                "trainer are to come: step optimizers when batches.ends_step is true"
            )
        self._take()
        for sums in self._sums:
            sums.reduce(self._channel, self._blocks, self._scale)
        self._reduced = True

    def watch(self, scaler: Any) -> None:
        """Sum before a GradScaler looks for gradients that are not finite: what one rank has, all ranks see.

        **Arguments**

        - `scaler`: of the training loop.
        """
        self._scaler = scaler
        for name in ("unscale_", "step"):
            setattr(scaler, name, self._summing_before(getattr(scaler, name)))

    def _summing_before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def summed(optimizer: Optimizer, *args: Any, **more: Any) -> Any:
            if self.has(optimizer):
                self.reduce()
            return call(optimizer, *args, **more)

        return summed

    def share(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Take rank 0's weights, as all ranks have to begin with the same ones.

        **Arguments**

        - `tensors`: which, in the same order on all ranks; None: the parameters. Buffers are none.
        """
        ours, size = self._parameters if tensors is None else list(tensors), self._peers.size
        if size == 1:
            return
        self._compare([f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in ours])
        for tensor in ours:
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            sent = flat.repeat(size) if self._peers.rank == 0 else flat[:0]
            to, of = [len(sent) // size] * size, [len(flat)] + [0] * (size - 1)
            come = self._channel.swap(sent, to, of, tag="weights of rank 0")
            tensor.detach().copy_(come.view(tensor.dtype).view(tensor.shape))

    def _compare(self, shapes: list[str]) -> None:
        """End all ranks unless all have tensors of the same shapes."""
        digest = np.frombuffer(hashlib.sha256("\n".join(shapes).encode()).digest(), np.uint8)
        come = self._peers.channel("start").exchange([digest] * self._peers.size, "shapes of the model")
        others = [rank for rank, theirs in enumerate(come) if theirs.tobytes() != come[0].tobytes()]
        if others:
            why = (
                f"{ranks_named(others)} {'have' if len(others) > 1 else 'has'} a model of other shapes than rank 0: "
                "make the same model on all ranks"
            )
            self._peers.fail(why)
            raise PeerError(why)

    def _take(self) -> None:
        """Copy the gradients of a backward into the sums."""
        trained = [weight for weight in self._parameters if weight.requires_grad]
        layout = tuple(id(weight) for weight in trained)
        if layout != self._layout:
            if self._next != self._mine.start:
                raise RuntimeError("requires_grad of a parameter changed within a step: change it between two steps")
            kinds: dict[torch.dtype, list[Tensor]] = {}
            for weight in trained:
                kinds.setdefault(weight.dtype, []).append(weight)
            self._sums = [_Sums(weights, self._peers.size, self._mine) for weights in kinds.values()]
            self._layout = layout
        for sums in self._sums:
            sums.take(self._next)

    def has(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's parameters are ours; some and not others would be summed and not summed."""
        ours = [id(weight) in self._known for group in optimizer.param_groups for weight in group["params"]]
        if any(ours) and not all(ours):
            raise ValueError(
                f"{len(ours) - sum(ours)} of {len(ours)} parameters of {type(optimizer).__name__} are not in the model that "
                "skirl.lookahead was given, so their gradients would differ between trainers: give it the whole model, or "
                "those an optimizer of their own"
            )
        return any(ours)

    def before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An optimizer is about to step: sum now, or after the closure that it was given."""
        given = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if given is None:
            self.reduce()
            return None

        def closure() -> Any:
            loss = given()
            self.reduce()
            return loss

        if len(args) > 1:
            return (args[0], closure, *args[2:]), kwargs
        return args, kwargs | {"closure": closure}


@cache
def _watch_optimizers() -> None:
    """Hear of each optimizer's steps, from now on: torch does not let hooks come and go while another thread steps."""
    register_optimizer_step_pre_hook(_before_any_step)


def _before_any_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Called by torch before each step of each optimizer: at most one of these has its parameters."""
    for dense in tuple(_open):
        if dense.has(optimizer):
            return dense.before_step(args, kwargs)
    return None


class OfAllTrainers:
    """Sums of blocks of leaves to those of all leaves, for whoever keeps the gradients of this trainer's block.

    **Arguments**

    - `peers`: the trainers; the thread that calls this talks over their channel "dense".
    - `shards`: of a step.
    - `accumulate`: micro-batches of a shard.
    """

    def __init__(self, peers: Peers, shards: int, accumulate: int = 1) -> None:
        self._peers, self._channel = peers, peers.channel("dense")
        self._blocks = [leaves_of(block_of(rank, peers.size, shards), accumulate) for rank in range(peers.size)]

    @property
    def mine(self) -> range:
        """The leaves of this trainer."""
        return self._blocks[self._peers.rank]

    def sum(
        self, weights: Sequence[Tensor], totals: Sequence[tuple[int, Sequence[Tensor | None]]]
    ) -> list[Tensor | None]:
        """The sum over all leaves, for each weight; None of a weight that has a gradient nowhere.

        **Arguments**

        - `weights`: the same on all ranks, in the same order.
        - `totals`: of whole subtrees of this trainer's block, by their first leaf: the gradient of each weight, or None.
        """
        found: list[Tensor | None] = [None] * len(weights)
        known = dict(totals)
        for dtype in sorted({weight.dtype for weight in weights}, key=str):
            places = [n for n, weight in enumerate(weights) if weight.dtype == dtype]
            parts = [
                [None if leaves.start not in known else known[leaves.start][n] for n in places]
                for leaves in subtrees(self.mine.start, self.mine.stop)
            ]
            for n, total in zip(places, self._sum([weights[n] for n in places], parts), strict=True):
                found[n] = total
        return found

    def _sum(self, weights: list[Tensor], parts: list[list[Tensor | None]]) -> list[Tensor | None]:
        size = self._peers.size
        numbers = sum(weight.numel() for weight in weights)
        piece = -(-(numbers + len(weights)) // size)
        send = weights[0].detach().new_zeros((len(parts), size * piece))
        for row, grads in zip(send, parts, strict=True):
            self._lay_out(row, weights, grads)
        send = send.view(len(parts), size, piece).transpose(0, 1).contiguous()
        trees = [subtrees(block.start, block.stop) for block in self._blocks]
        come = [send.new_empty(len(tree), piece) for tree in trees]
        come[self._peers.rank] = send[self._peers.rank]
        self._channel.swap_parts(list(send), come, tag="partial sums of dense gradients")
        total = tree_sum(
            zip((leaves.start for tree in trees for leaves in tree), (row for rows in come for row in rows)),
            Tensor.add_,
        )
        assert total is not None
        whole = send.new_empty(size, piece)
        whole[self._peers.rank] = total
        self._channel.swap_parts([whole[self._peers.rank]] * size, list(whole), tag="sums of dense gradients")
        flat = whole.view(-1)
        there = flat[numbers : numbers + len(weights)].tolist()
        views = flat[:numbers].split([weight.numel() for weight in weights])
        return [v.view(w.shape) if have else None for v, w, have in zip(views, weights, there, strict=True)]

    @staticmethod
    def _lay_out(row: Tensor, weights: list[Tensor], grads: list[Tensor | None]) -> None:
        """Gradients one after the other, then of each whether there is one; -0 for one that is not changes no sum."""
        at = 0
        for weight, grad in zip(weights, grads, strict=True):
            view = row[at : at + weight.numel()]
            view.fill_(-0.0) if grad is None else view.copy_(grad.reshape(-1))
            at += weight.numel()
        row[at : at + len(grads)] = torch.tensor([float(grad is not None) for grad in grads])


class _Sums:
    """The gradients of one kind of numbers, one after the other in one buffer, and behind them who has one."""

    def __init__(self, weights: list[Tensor], size: int, mine: range) -> None:
        self._weights, self._size, self._mine = weights, size, mine
        numbers = sum(weight.numel() for weight in weights)
        self._piece = -(-(numbers + len(weights)) // size)
        """What each rank sums, of every shard."""
        self._like = weights[0].detach()
        self._spare: list[Tensor] = []
        self._come: list[Tensor] | None = None
        """Where other ranks' parts go: kept, for memory that is new has to be mapped first."""
        self._begins = np.cumsum([0, *(weight.numel() for weight in weights)]).tolist()
        self.begin()

    def begin(self) -> None:
        """Forget what was taken."""
        self._block: BlockSum[Tensor] = BlockSum(self._mine, self._add)

    def _add(self, left: Tensor, right: Tensor) -> Tensor:
        self._spare.append(right)
        return left.add_(right)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a buffer."""
        begins = self._begins
        return [flat[lo:hi].view(w.shape) for w, lo, hi in zip(self._weights, begins, begins[1:])]

    def take(self, shard: int) -> None:
        """The gradients that lie in `.grad`, of one shard."""
        flat = self._spare.pop() if self._spare else self._like.new_zeros(self._piece * self._size)
        views, there, have = self._views(flat), [], []
        for n, (weight, view) in enumerate(zip(self._weights, views)):
            if weight.grad is None:
                view.fill_(-0.0)  # what it is added to stays as it is, to the sign of a zero
            elif weight.grad.layout != torch.strided:
                raise ValueError(
                    f"a dense parameter of shape {tuple(weight.shape)} has a sparse gradient: make it with sparse=False, or "
                    "its rows a table of skirl's"
                )
            else:
                there.append(view)
                have.append(n)
        if there:
            torch._foreach_copy_(there, [grad for n in have if (grad := self._weights[n].grad) is not None])
        flags = flat[self._begins[-1] : self._begins[-1] + len(views)]
        flags.fill_(1.0)
        if len(have) < len(views):
            flags[[n for n in range(len(views)) if n not in have]] = 0.0
        self._block.take(shard, flat)

    def reduce(self, channel: Any, blocks: list[range], scale: float) -> None:
        """The sum over all shards, into `.grad`."""
        size, piece = self._size, self._piece
        mine = [total for _, total in self._block.totals()]
        if size > 1:
            trees = [subtrees(block.start, block.stop) for block in blocks]
            send = mine[0].view(size, 1, piece)
            if len(mine) > 1:
                send = torch.stack([part.view(size, piece) for part in mine], dim=1)
            if self._come is None:
                self._come = [send.new_empty(len(tree), piece) for tree in trees]
            channel.swap_parts(list(send), self._come, tag="partial sums of dense gradients")
            come = [*self._come[: channel.rank], send[channel.rank], *self._come[channel.rank + 1 :]]
            parts = [row for rows in come for row in rows.unbind(0)]
            total = tree_sum(zip([leaves.start for tree in trees for leaves in tree], parts), Tensor.add_)
            assert total is not None
            flat = mine[0]
            whole = list(flat.view(size, piece))
            torch.mul(total, scale, out=whole[channel.rank])
            channel.swap_parts([whole[channel.rank]] * size, whole, tag="sums of dense gradients")
        else:
            flat = mine[0].mul_(scale)
        self._give(flat)
        self._spare += mine

    def _give(self, flat: Tensor) -> None:
        numbers = self._begins[-1]
        missing = [n for n, weight in enumerate(self._weights) if weight.grad is None]
        somewhere = flat[numbers : numbers + len(self._weights)]
        somewhere = set(np.flatnonzero(somewhere[missing].cpu().numpy()).tolist()) if missing else set()
        nowhere = {n for at, n in enumerate(missing) if at not in somewhere}
        there = [(w, v) for n, (w, v) in enumerate(zip(self._weights, self._views(flat))) if n not in nowhere]
        for weight, _ in there:
            if weight.grad is None:
                weight.grad = torch.empty_like(weight)
        if there:
            torch._foreach_copy_([w.grad for w, _ in there if w.grad is not None], [view for _, view in there])
