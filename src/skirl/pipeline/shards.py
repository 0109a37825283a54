"""The shards of a step in the loop: random numbers of their own, and dense gradients, summed over their tree."""

import hashlib
import threading
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from skirl.core.tree import BlockSum, add_lists, leaves, tree_sum
from skirl.nn.collection import collections_of
from skirl.nn.optimizers import hearing
from skirl.peers.base import Peers
from skirl.peers.dense import OfAllTrainers
from skirl.tools import rng_state


class Shards:
    """The random numbers of each shard, and its dense gradients: what the backward of each micro-batch leaves in
    `weight.grad` is taken until the step is complete, so that a loop may call `step()` and `zero_grad()` for each
    micro-batch. Only after the last one is there anything to step by."""

    def __init__(self, model: nn.Module, shards: int, accumulate: int, seed: int, mine: range, peers: Peers) -> None:
        self.peers = peers
        self._seed = seed
        self._first = mine.start * accumulate
        self._model = model
        self._collections = list(collections_of(model).values())
        self._times = 1 / shards
        self._leaves = leaves(shards * accumulate, shards)[mine.start * accumulate : mine.stop * accumulate]
        self._others = None if peers.size == 1 else OfAllTrainers(peers, shards, accumulate)
        self._weights: list[nn.Parameter] = []
        self._hooks: dict[nn.Parameter, Any] = {}
        block = range(1 + leaves(shards * accumulate, shards)[-1]) if self._others is None else self._others.mine
        self._sums: BlockSum[list[Tensor | None]] = BlockSum(block, add_lists)
        self._thread = 0
        self._micro: int | None = None
        self._reached: set[str] = set()
        """What a backward that is under way has brought gradients: weights of the model, and others."""
        self._returned = False
        """Whether a backward of the micro-batch brought the weights theirs."""
        self._looked_up = 0
        """Collections whose lookup of the micro-batch had its backward."""
        self._reduced: dict[nn.Parameter, tuple[ref[Tensor], int]] = {}
        """What the step's gradients are, once they are in place, and as long as they are kept: each with its version."""

    def check(self) -> None:
        check_sharded(self._model)
        if self.peers.size > 1:
            check_weights(self._model, self.peers)

    def open(self) -> None:
        self._thread = threading.get_ident()
        hearing.add(self)

    def close(self) -> None:
        rng_state.swap_out()
        hearing.discard(self)
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._micro = None
        self._sums.totals()

    def begin(self, step: int, micro: int) -> None:
        if micro == 0:
            self._sums.totals()
            self._find_weights()
        self._micro, self._returned, self._looked_up = micro, False, 0
        self._reached.clear()
        rng_state.swap_in(self._seed, step, self._first + micro)

    def leave(self) -> None:
        """Let the micro-batch leave the loop. What comes next, such as reading the loader, draws the run's own numbers."""
        rng_state.swap_out()
        if self._micro is not None and not self._ends_step:
            self._take()
        elif self._others is not None and self._micro is not None and not self._returned:
            self.complete()  # the others have gradients, and wait for this trainer
        self._micro = None

    def left(self, step: int, micro: int | None) -> None:
        """End the loop on all trainers after the same step: each tells the others its own; within a step it ends the job."""
        peers = self.peers
        if peers.size == 1:
            return
        if micro is not None:
            why = (
                f"rank {peers.rank} left its loop in micro-batch {micro} of step {step:,} while other trainers go on with "
                "that step: leave the loop only when batches.ends_step is true, after the same step on all trainers"
            )
            peers.fail(why)
            raise RuntimeError(why)
        for rank, theirs in enumerate(peers.channel("lookups").told(step, "the end of a loop")):
            if theirs != step:
                raise RuntimeError(
                    f"rank {peers.rank} left its loop after step {step:,} and rank {rank} after step {theirs:,}: leave "
                    "loops after the same step on all trainers"
                )

    @property
    def _ends_step(self) -> bool:
        return self._micro is not None and self._micro + 1 == len(self._leaves)

    def _find_weights(self) -> None:
        weights = [w for w in self._model.parameters() if not nn.parameter.is_lazy(w) and w.numel()]
        self._weights = [w for w in weights if w.requires_grad or w.grad is not None]
        for weight in self._weights:
            if weight.requires_grad and weight not in self._hooks:
                self._hooks[weight] = weight.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, weight: Tensor) -> None:
        if self._micro is not None:
            if self._returned and "model" not in self._reached:
                raise RuntimeError(
                    "a second backward has reached dense weights in one shard of a step, whose gradients were summed after "
                    "the first: sum the losses, and call backward once for each batch of the lookahead"
                )
            self._reach("model")

    def _reach(self, what: str) -> None:
        if self._micro is not None:
            if not self._reached:
                torch.autograd.Variable._execution_engine.queue_callback(self._ended)
            self._reached.add(what)

    def _ended(self) -> None:
        reached, before = set(self._reached), self._looked_up
        self._reached.clear()
        self._looked_up = sum(c.current.returned_now for c in self._collections)
        if "others" in reached and (len(reached) > 1 or self._looked_up > before):
            raise RuntimeError(
                "the losses train weights that are not in the model which skirl.lookahead was given, so that their "
                "gradients are not summed over the shards of a step: give it the whole model"
            )
        if "model" in reached:
            if self._ends_step:
                self.complete()
            else:
                self._take()
            self._returned = True

    def _take(self) -> None:
        assert self._micro is not None
        grads = [weight.grad for weight in self._weights]
        if self._micro == 0:
            self._check_cleared()
        if all(grad is None for grad in grads):
            return
        for weight, grad in zip(self._weights, grads, strict=True):
            if grad is not None and grad.layout != torch.strided:
                raise RuntimeError(
                    f"a dense weight of shape {list(weight.shape)} has a sparse gradient, for whose sum torch fixes no "
                    "order: make its module with sparse=False, or the weight a skirl.Table"
                )
            weight.grad = None
        self._sums.take(self._leaves[self._micro], grads)

    def _check_cleared(self) -> None:
        before, self._reduced = self._reduced, {}
        for weight, (grad, version) in before.items():
            if weight.grad is not None and weight.grad is grad() and weight.grad._version == version + 1:
                raise RuntimeError(
                    "this step added to the dense gradients of the step before: call step() and zero_grad() of the dense "
                    "optimizer for each step. To accumulate over k micro-batches of each shard pass accumulate=k to "
                    "skirl.lookahead"
                )

    def complete(self) -> None:
        """Put the gradients of the step in their place, after its last shard and once: the mean over its shards."""
        if not self._ends_step or self._returned:
            return
        self._returned = True
        if self._others is None:
            self._take()
            total = tree_sum(self._sums.totals(), add_lists) or []
            # From 0, so that no -0.0 tells which shards had no gradient.
            mean = [None if grad is None else grad.mul_(self._times).add_(0.0) for grad in total]
        else:
            for collection in self._collections:  # in the order of the others, whose rows had a backward
                collection.current.update_together()
            self._take()
            mean = self._others.mean(self._weights, self._sums.totals())
        for weight, grad in zip(self._weights, mean):
            if grad is not None:
                weight.grad = grad
                self._reduced[weight] = ref(grad), grad._version

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before each step of an optimizer: without a complete step there is nothing that it could step by."""
        here = self._thread == threading.get_ident()  # one of another thread is of another loop
        if not here or self._micro is None:
            return
        known = set(self._weights)
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight not in known and weight not in self._hooks and weight.requires_grad and weight.numel():
                    # Of another model, or of this one and forgotten: whether a loss of ours reaches it will tell.
                    self._hooks[weight] = weight.register_post_accumulate_grad_hook(lambda _: self._reach("others"))
        if self._ends_step:
            self.complete()
        else:
            self._take()


def check_sharded(model: nn.Module) -> None:
    """Refuse a model whose results depend on who computes which shard."""
    for name, module in model.named_modules():
        what = f"{type(module).__name__} {name!r}" if name else f"the {type(module).__name__}"
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"{what} averages gradients in an order of its own: give the lookahead, and call, the module in it; shards "
                "are summed without it"
            )
        if isinstance(module, _NormBase) and module.training and module.running_mean is not None:
            raise ValueError(
                f"{what} keeps running statistics, which depend on the order of the shards of a step: use nn.LayerNorm, set "
                "track_running_stats=False, or call its eval()"
            )


def check_weights(model: nn.Module, peers: Peers) -> None:
    """Raise if dense weights, or scales of GradScalers, differ between trainers. All call this at once, between steps."""
    mine = {name: _digest(w) for name, w in model.named_parameters() if not nn.parameter.is_lazy(w) and w.numel()}
    for name, collection in collections_of(model).items():
        scaler = collection.grad_scaler
        mine[f"grad_scaler of {name!r}"] = str(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else ""
    for rank, theirs in enumerate(peers.channel("lookups").told(mine, "dense weights")):
        if wrong := next((name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)), None):
            raise ValueError(
                f"{wrong} differs between ranks {peers.rank} and {rank}: begin with the same model and GradScaler on all "
                "trainers, and call torch.manual_seed(0) before you make the model"
            )


def _digest(weight: torch.Tensor) -> str:
    raw = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=8).hexdigest()
