"""The modules that a model holds: they look rows up by the current Step, and their backward trains the rows.

Rows are no Parameters: a Parameter would need every row on the device, and a dense optimizer would walk over all of them.
A backward through the module's output sums each row's gradients and applies the row optimizer at once, so no gradient of
rows is ever kept: 16,384 x 26 x 64 floats a step stay what autograd holds anyway.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skirl.core.batch import Sparse
from skirl.core.ids import BankIds, capture, distinct
from skirl.core.optim import RowOptimizer, TorchHandle
from skirl.core.tables import Table
from skirl.engine.cache import CacheSize
from skirl.engine.engine import Engine, Leaving
from skirl.engine.work import Micro, Work
from skirl.nn.looked_up import Found, LookedUp
from skirl.nn.lookup import Lookup, Ticket
from skirl.nn.output import Pooled, Unpooled, uncompiled
from skirl.oracle.planner import Plan, Planner
from skirl.store import Store
from skirl.tools.interrupts import uninterrupted


class Collection(nn.Module):
    """What pooled and unpooled collections share."""

    pooled = True

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        optimizer: RowOptimizer,
        cache: CacheSize,
        store: str | Store = "memory",
        device: str | torch.device = "cpu",
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        resume: bool = False,
        debug: bool = False,
        grad_scaler: Any = None,
    ) -> None:
        super().__init__()
        self.engine = Engine(
            tables,
            optimizer=optimizer,
            cache=cache,
            store=store,
            dtype=dtype,
            seed=seed,
            resume=resume,
            pooled=self.pooled,
            device=device,
        )
        self.debug = debug
        self.grad_scaler = grad_scaler
        # It makes backward run where no Parameter comes before.
        self.anchor = torch.zeros((), device=self.engine.device.at, requires_grad=True)
        self.optimizer = TorchHandle(optimizer, self.anchor)
        self.lookahead: Any = None
        self.found: Found | None = None
        """What was looked up for the batch that comes next, while the model is evaluated: see read_ahead."""
        self.work: Work | None = None
        self.micro = 0
        self._planner: Planner | None = None
        self._planner_steps = 0

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables, as given."""
        return self.engine.schema.tables

    @uncompiled
    def forward(self, sparse: Sparse) -> Pooled:
        """Look the ids of one batch up."""
        self.engine.check()
        if not (self.training and torch.is_grad_enabled()):
            return self._peek(sparse)
        if self.lookahead is None:
            self._step_alone(sparse)
        work = self._expected(sparse)
        micro = work.micros[self.micro]
        micro.entered = True
        weights = sparse.weights_or_none()
        if weights is not None and (weights.requires_grad or _differ(weights, micro.captured.weights)):
            micro.weights = weights if weights.requires_grad else None
            for ids, now in zip(
                micro.ids, self.engine.resolve(capture(sparse, self.engine.schema, copy=False)), strict=True
            ):
                ids.scale = now.scale  # weights made in the loop were not there, or others, when the batch was read
        tickets = [Ticket(self, work, self.micro, bank) for bank in range(len(micro.ids))]
        banks = list(Lookup.apply(self.anchor, micro.weights, tickets))
        return self._result(banks, tickets, micro.ids)

    def state_dict_of_rows(self) -> dict[str, Any]:
        """Which store, at which point, holds the rows: what `state_dict` carries instead of them."""
        store = self.engine.store
        return {"identity": store.identity, "generation": store.generation, "steps": self.engine.counters.steps}

    def get_extra_state(self) -> dict[str, Any]:
        """For state_dict: rows stay in the store, the state names it."""
        return self.state_dict_of_rows()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """For load_state_dict: the rows must be those that the state was saved with."""
        here = self.state_dict_of_rows()
        for field, meaning in (
            ("identity", "another store's rows"),
            ("generation", "rows of another snapshot"),
            ("steps", "rows of another step"),
        ):
            if state.get(field) != here[field]:
                raise RuntimeError(
                    f"the state was saved with {meaning}: its {field} is {state.get(field)}, here it is {here[field]}. Rows "
                    "are not in a state_dict: save and load them together with skirl.save and skirl.load. To load the rest "
                    "alone, leave the key that ends with '_extra_state' out and pass strict=False"
                )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse `copy` and `pickle`: two modules over one cache would each move its rows by a plan of their own."""
        raise TypeError(
            "embeddings cannot be copied or pickled: their rows live in a cache and a store. Make new ones; rows go from "
            "one to the other by skirl.save and skirl.load"
        )

    def flush(self) -> None:
        """Write every resident row to the store."""
        self.engine.check()
        if self.lookahead is not None:
            self.lookahead.drain()
        self.engine.flush()

    def close(self) -> None:
        """Flush and let the store go, once a checkpoint that is being written is on disk."""
        if self.lookahead is not None:
            raise RuntimeError("a lookahead over these embeddings is open: leave its with-block first")
        if self.engine.saving is not None:
            self.engine.saving.wait()
        if not self.engine.store.closed:
            self.flush()
            self.engine.store.close()

    def expect(self, work: Work | None, micro: int) -> None:
        """The lookahead's word: the next forward is of this micro-batch."""
        self.work, self.micro = work, micro

    def finish(self, apply: bool = True) -> None:
        """The lookahead's word: the current step is over; apply what came back if only a part did, or drop it."""
        with uninterrupted():
            work, self.work = self.work, None
            if apply and work is not None and work.returned and not work.updated:
                self._update(work)

    def forget(self) -> None:
        """The rows have been replaced: no step is current, and no plan holds."""
        self.work = None
        self._planner = None

    def opened(self, lookahead: Any) -> None:
        """A lookahead begins; `None`: it ended."""
        if lookahead is not None and self.lookahead is not None:
            raise RuntimeError(
                "another lookahead over these embeddings is open: leave its with-block first, or call "
                "embeddings.lookahead.close()"
            )
        self.finish()
        self.lookahead = lookahead
        self._planner = None
        self.work = None

    def _expected(self, sparse: Sparse) -> Work:
        """Check that this forward is of the current Step's batch, and of no other."""
        work = self.work
        if work is None:
            raise RuntimeError(
                "no batch is current: run forward on the batch that the lookahead yielded last, inside its loop"
            )
        micro = work.micros[self.micro]
        if micro.entered:
            raise RuntimeError(
                "this batch already had its forward: one batch is one Step. For a second look use model.eval() or "
                "torch.no_grad(); for micro-batches use lookahead(accumulate=k)"
            )
        captured = micro.captured
        values = sparse.values()
        if values.numel() != len(captured.values):
            raise ValueError(
                f"forward got {values.numel()} ids, the current batch has {len(captured.values)}: pass the batch that the "
                "lookahead yielded, unchanged"
            )
        weights = sparse.weights_or_none()
        if weights is None and captured.weights is not None:
            raise ValueError(
                "forward got no weights, the current batch has some: pass the batch that was yielded, unchanged"
            )
        if self.debug and not (
            tuple(sparse.keys()) == captured.keys
            and np.array_equal(values.cpu().numpy(), captured.values)
            and np.array_equal(sparse.offsets().cpu().numpy(), captured.offsets)
        ):
            raise ValueError(
                "forward got other ids than the current batch has: pass the batch that the lookahead yielded, unchanged"
            )
        return work

    def _step_alone(self, sparse: Sparse) -> None:
        """Without a lookahead: plan, fetch and load this one batch now."""
        engine = self.engine
        self.finish()
        captured = capture(sparse, engine.schema)
        micro = Micro(None, captured, self.engine.resolve(captured))
        if not engine.caches:
            demand = [len(distinct(ids.keys)) for ids in micro.ids]
            engine.make_caches(demand, demand, 4)
            engine.split_by_one = True  # a lookahead will split by its window
        if self._planner is None:
            residents = [cache.resident() for cache in engine.caches]
            plan = Plan(depth=1, prefetch=0)
            self._planner = Planner(
                engine.schema, [len(c) for c in engine.caches], plan, engine.seen, residents=residents
            )
            self._planner_steps = 0
            engine.forget_moves()
        with uninterrupted() as hold:
            try:
                self._planner.add([ids.positions for ids in micro.ids], captured.nbytes)
                steps = self._planner.next()
                assert steps is not None
                work = Work(self._planner_steps, [micro], steps)
                with hold.released():  # a store may hang
                    work.fetched.extend(engine.fetch(work))
                leaving: Leaving = []
                engine.load(work, lambda number, rows: leaving.extend(rows))
                self._planner_steps += 1
                self._planner.executed(self._planner_steps)
                hold.most = 2  # the first Ctrl-C waits for the write, the second gives the rows up
                engine.write(leaving)
                hold.most = None
            except BaseException:
                self._planner.rollback(self._planner_steps)  # the step did not happen
                self._planner = None
                raise
            self.work, self.micro = work, 0

    def _peek(self, sparse: Sparse) -> Pooled:
        """Look rows up as the executed steps left them; nothing changes, not even what is resident."""
        if self.lookahead is not None:
            self.lookahead.drain()
        early, self.found = self.found, None
        found = (early.take(sparse) if early is not None else None) or self.looked_up(sparse)
        banks = []
        for bank, (part, rows, slots) in enumerate(found):
            banks.append(self._shaped(self.engine.banks[bank].pool_rows(rows, part, slots), bank, part))
        return self._result(banks, None, [part for part, _, _ in found])

    def looked_up(self, sparse: Sparse) -> LookedUp:
        """Rows as the executed steps left them, by bank; by any thread, as long as no step is under way."""
        ids = self.engine.resolve(capture(sparse, self.engine.schema, copy=False))
        return [(part, *self.engine.peek(part.keys, bank)) for bank, part in enumerate(ids)]

    def _shaped(self, flat: Tensor, bank: int, ids: BankIds) -> Tensor:
        return flat.view(ids.batch, len(self.engine.schema.banks[bank].features), flat.shape[-1])

    def _result(self, banks: list[Tensor], tickets: list[Ticket] | None, ids: list[BankIds]) -> Pooled:
        return Pooled(self, banks, tickets, ids)

    def returned(self, ticket: Ticket, grad: Tensor | None) -> None:
        """Backward reached one bank of one micro-batch."""
        if grad is not None and ticket.live.any():
            grad = grad.reshape(-1, grad.shape[-1]).contiguous()
            if grad.is_cuda and len(ticket.work.micros) > 1:
                grad = grad.clone()  # a CUDA graph writes the next micro-batch's to the same place
            ticket.work.grads[ticket.bank, ticket.micro] = grad
            ticket.work.live[ticket.bank, ticket.micro] = ticket.live

    def backward_done(self, work: Work) -> None:
        """Backward of one micro-batch is complete; the last one updates the rows."""
        with uninterrupted():  # a step that returned and was not updated would be applied later, by `finish`
            work.returned += 1
            if work.returned == len(work.micros):
                self._update(work)

    def require_current(self, work: Work) -> None:
        """Refuse a backward that comes too late."""
        if work is not self.work:
            raise RuntimeError(
                "backward of a batch that is not current any more: its rows may have left the cache. Call backward "
                "before the next batch is taken, and before skirl.save"
            )

    def _update(self, work: Work) -> None:
        """Under `uninterrupted`."""
        if self.grad_scaler is not None and not self._unscale(work):
            work.updated = True
            self.anchor.grad = torch.full_like(self.anchor, torch.inf)
            return
        lr = self.optimizer.lr
        try:
            self.engine.update(work, lr)
        except BaseException as error:
            self.engine.lose(f"rows of a step were being updated when {error!r} happened", error)
            raise

    def _unscale(self, work: Work) -> bool:
        """Divide the loss scale out; False when a gradient is not finite and the step is to be skipped.

        The anchor's gradient says which, so that `scaler.step(embeddings.optimizer)` lets the scaler know as well: rows
        may overflow where no dense gradient does, and would be skipped for ever at a scale that nobody lowers.
        """
        self.anchor.grad = torch.zeros_like(self.anchor)
        inverse = 1.0 / self.grad_scaler.get_scale()
        for grad in work.grads.values():
            if not torch.isfinite(grad).all():
                return False
        for place, grad in work.grads.items():
            work.grads[place] = grad * inverse
        return True


def _differ(weights: Tensor, read: np.ndarray | None) -> bool:
    """Whether weights are not those that the batch had when it was read: a loop may change them, to drop ids out say."""
    return read is None or not np.array_equal(weights.detach().cpu().to(torch.float64).numpy(), read.astype(np.float64))


def collection_of(model: nn.Module) -> Collection:
    """The one collection of a model."""
    found = [module for module in model.modules() if isinstance(module, Collection)]
    if len(found) != 1:
        raise ValueError(
            f"the model has {len(found)} skirl collections, and has to have exactly one. "
            + ("Put all tables into one collection" if found else "Give it a skirl.EmbeddingBagCollection")
        )
    return found[0]


class EmbeddingBagCollection(Collection):
    """Pooled embeddings of any number of tables, whose rows live outside the device.

    >>> import skirl
    >>> embeddings = EmbeddingBagCollection(
    ...     [Table("user", rows=1000, dim=4), Table("item", rows=1000, dim=4, features=("clicked", "bought"))],
    ...     optimizer=skirl.RowwiseAdagrad(lr=0.02), cache="10%", store="memory", seed=0)
    >>> ids = skirl.KeyedJagged(["user", "clicked", "bought"], torch.tensor([7, 1, 2, 1]), lengths=torch.tensor([1, 2, 1]))
    >>> embeddings(ids)["clicked"].sum().backward()  # rows 1 and 2 of "item" are trained here
    >>> embeddings.engine.counters.new
    3
    """


class EmbeddingCollection(Collection):
    """Embeddings without pooling: one row an id.

    >>> import skirl
    >>> embeddings = EmbeddingCollection([Table("item", 1000, 4)], optimizer=skirl.SGD(lr=0.1), cache=100)
    >>> ids = skirl.KeyedJagged(["item"], torch.tensor([7, 1, 7]), lengths=torch.tensor([2, 1]))
    >>> embeddings(ids)["item"].shape
    torch.Size([3, 4])
    """

    pooled = False

    def _shaped(self, flat: Tensor, bank: int, ids: BankIds) -> Tensor:
        return flat

    def _result(self, banks: list[Tensor], tickets: list[Ticket] | None, ids: list[BankIds]) -> Pooled:
        return Unpooled(self, banks, tickets, ids)
