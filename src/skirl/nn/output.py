"""What a lookup returns: pooled vectors or rows by feature, cut when asked for, and their way through autograd."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, wraps
from math import prod
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from skirl.core.ids import BadIds, BankIds
from skirl.core.once import Distinct, expand, padded
from skirl.core.tables import Pooling, Schema
from skirl.nn.current_step import Ticket


def pooled(flat: Tensor, offsets: np.ndarray, mode: Pooling) -> Tensor:
    """Sum or average the rows of all samples, `[ids, dim]`, by sample, zeros for a sample without ids."""
    lengths = torch.from_numpy(np.diff(offsets).astype(np.int64)).to(flat.device)
    # Sums in order, so that a run repeats bit for bit on a GPU. The lengths need no check.
    sums = torch.segment_reduce(flat, "sum", lengths=lengths, initial=0.0, unsafe=True)
    return sums if mode == "sum" else sums / lengths.clamp(min=1).unsqueeze(1)


Method = TypeVar("Method", bound=Callable[..., Any])


def uncompiled(method: Method) -> Method:
    """Keep torch.compile out of a method, since its effects on rows are not part of a graph. torch.compiler.disable as
    a decorator would import the compiler, which takes 1.3 s."""

    @wraps(method)
    def called(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(method)(*args)
        return method(*args)

    return cast(Method, called)


class Output(Mapping[str, Tensor]):
    """The output of a collection for a batch, by feature: [batch, dim], or a row for each id if nothing is pooled.

    >>> import skirl, torch
    >>> tables = [skirl.Table("user", 10, 2), skirl.Table("item", 10, 2)]
    >>> embeddings = skirl.EmbeddingBagCollection(tables, optimizer=skirl.SGD(lr=0.1), cache=10)
    >>> out = embeddings(skirl.KeyedJagged.one_hot(["user", "item"], torch.tensor([[1, 2], [3, 4], [5, 6]])))
    >>> list(out), out["item"].shape, out.stacked().shape
    (['user', 'item'], torch.Size([3, 2]), torch.Size([3, 2, 2]))
    >>> out
    Output(user: [3, 2], item: [3, 2])
    """

    def __init__(
        self, schema: Schema, banks: list[Tensor], tickets: list[Ticket] | None, ids: list[BankIds],
        bags: list[Tensor | None],
    ) -> None:  # fmt: skip
        self._schema = schema
        self.banks = banks
        self._bags = bags
        self._tickets = tickets
        self._ids = ids
        self._split: dict[int, tuple[Tensor, ...]] = {}
        self._once: dict[int, dict[int, Tensor]] = {}
        self._copied: dict[tuple[int, int], Tensor] = {}
        """By bank and feature: the rows of shared bags for all samples, which only an unpooled output copies."""
        self._unpooled = not ids[0].pooled
        self._mode: Pooling | None = None
        """How rows of an unpooled output are pooled when they are asked for; None: they are not."""
        self._names: Sequence[str] = schema.features

    @cached_property
    def _all(self) -> dict[str, tuple[int, int]]:
        """Of each feature: its bank, and its column there."""
        return {
            feature.name: (bank, feature.column)
            for bank, members in enumerate(self._schema.banks)
            for feature in members.features
        }

    def check_frozen(self) -> None:
        """Refuse a second lookup after rows were frozen or unfrozen: a step has one answer to which it trains."""
        if any((ticket.current.trained(ticket.bank) != ticket.trained).any() for ticket in self._tickets or ()):
            raise RuntimeError(
                "rows were frozen or unfrozen between two lookups of one batch: do so before the first, and call .detach() "
                "on an output that is to train no row"
            )

    def only(self, names: Collection[str]) -> Self:
        """Return the output of some features from the same lookup. Names that the collection does not have are skipped."""
        chosen = [name for name in self._schema.features if name in names]
        if len(chosen) == len(self._schema.features):
            return self
        if not chosen:
            raise BadIds(
                f"the batch has no feature {self._schema.features[0]!r}: it has {', '.join(map(repr, names)) or 'none'}"
            )
        part = copy(self)
        part._names = chosen
        return part

    @property
    def fixed(self) -> bool:
        """Whether the shapes of a lookup depend on the size of its batch alone: no lists of rows, and no shared bags."""
        return not self._unpooled and not any(ids.shares for ids in self._ids)

    def over(self, banks: Sequence[Tensor]) -> tuple[Self, list[list[bool]]]:
        """Return the same output over other banks, which no backward trains, and by bank which features have had a
        gradient, which a backward fills in."""
        part, live = copy(self), [[False] * ids.features for ids in self._ids]
        part._tickets, part.banks, part._split = None, [], {}
        for bank, rows in enumerate(banks):
            cut = [self._passing(bank, column, each) for column, each in enumerate(rows.unbind(1))]
            part.banks.append(_marked(rows.view_as(rows), live[bank], range(len(cut))))
            part._split[bank] = tuple(_marked(each, live[bank], [column]) for column, each in enumerate(cut))
        return part, live

    def backward(self, grads: Sequence[Tensor | None], live: Sequence[Sequence[bool]]) -> None:
        """Train the rows with gradients of the banks from such a graph, and with what it said of features."""
        assert self._tickets is not None
        for ticket, features in zip(self._tickets, live, strict=True):
            ticket.live |= np.array(features)
        trained = [grad if ticket.trained.any() else None for ticket, grad in zip(self._tickets, grads, strict=True)]
        if any(grad is not None for grad in trained):
            hand_back(self._tickets, trained, [None] * len(trained))

    def pooling(self, mode: Pooling | None) -> Self:
        """Return the same lookup with the rows of each sample summed or averaged."""
        part = copy(self)
        part._mode = mode
        return part

    @uncompiled
    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(f"no feature {name!r}: take one of {', '.join(map(repr, self))}")
        bank, column = self._all[name]
        rows = self._passing(bank, column, self._of_samples(bank, column))
        return rows if self._mode is None else pooled(rows, self._offsets(name), self._mode)

    @uncompiled
    def distinct(self, name: str) -> Distinct:
        """Return the distinct bags of a feature, to compute something once per bag and then copy it to the samples.

        A feature without an inverse has a bag for each sample.

        >>> import skirl, torch
        >>> embeddings = skirl.EmbeddingBagCollection([skirl.Table("item", 10, 2)], optimizer=skirl.SGD(lr=0.1), cache=10)
        >>> ids = skirl.KeyedJagged(["item"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]), strides=[2],
        ...                         inverse={"item": torch.tensor([0, 0, 1])})
        >>> out = embeddings(ids)
        >>> out["item"].shape, out.distinct("item").rows.shape, out.distinct("item").inverse.tolist()
        (torch.Size([3, 2]), torch.Size([2, 2]), [0, 0, 1])
        """
        if name not in self._names:
            raise KeyError(f"no feature {name!r}: take one of {', '.join(map(repr, self))}")
        bank, column = self._all[name]
        inverse, at = self._ids[bank].inverse[column], self.banks[bank].device
        if inverse is None:
            rows, bags = self[name], self._ids[bank].batch
            inverse = np.arange(bags, dtype=np.int64)
        else:
            rows = self._passing(bank, column, self._distinct_rows(bank)[column])
            bags = len(self._offsets_of_bags(bank, column)) - 1
        begins = self._offsets_of_bags(bank, column) if self._unpooled else np.arange(bags + 1)
        offsets, which = (torch.from_numpy(array.astype(np.int64)).to(at) for array in (begins - begins[:1], inverse))
        return Distinct(rows, offsets, which)

    def _passing(self, bank: int, column: int, out: Tensor) -> Tensor:
        return out if self._tickets is None or self._tickets[bank].trained[column] else out.detach()

    def _offsets_of_bags(self, bank: int, column: int) -> np.ndarray:
        """Return where each bag of a feature begins, among the ids of its bank."""
        ids = self._ids[bank]
        return ids.offsets[ids.first[column] : ids.first[column + 1] + 1]

    def _distinct_rows(self, bank: int) -> dict[int, Tensor]:
        """Return the rows of distinct bags, by column: of all features if nothing is pooled, else of those that share."""
        if bank not in self._once:
            ids, rows = self._ids[bank], self.banks[bank] if self._unpooled else self._bags[bank]
            sizes, columns = np.diff(ids.offsets[ids.first]).tolist(), [*range(ids.features)]
            if ids.shares:
                sizes, columns = np.diff(ids.begins).tolist(), ids.columns.tolist()
            assert rows is not None
            parts = Cut.apply(rows, self._tickets[bank], columns, sizes) if self._tickets else rows.split(sizes)
            self._once[bank] = dict(zip(columns, parts, strict=True))
        return self._once[bank]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}: {list(self[name].shape)}' for name in self)})"

    def _of_samples(self, bank: int, column: int) -> Tensor:
        """Return a feature's vectors, or its rows for all samples: each feature has its own, since copies are large."""
        if self._unpooled:
            if (bank, column) not in self._copied:
                self._copied[bank, column] = self._expanded(bank, column, self._distinct_rows(bank)[column])
            return self._copied[bank, column]
        if bank not in self._split:
            rows, tickets = self.banks[bank], self._tickets
            columns = range(rows.shape[1])
            self._split[bank] = rows.unbind(1) if tickets is None else Cut.apply(rows, tickets[bank], columns)
        return self._split[bank][column]

    @uncompiled
    def stacked(self) -> Tensor:
        """Return all features as one [batch, features, dim] tensor, in table order. All dims must be equal."""
        if self._unpooled and self._mode is None:
            raise ValueError("an EmbeddingCollection returns rows by feature, of different lengths: take out[feature]")
        dims = sorted({self._schema.banks[self._all[name][0]].dim for name in self._names})
        if len(dims) != 1:
            raise ValueError(f"stacked() needs tables of one dim, these have {dims}: take the features one by one")
        if len(self.banks) > 1 or len(self._names) < len(self._all) or self._unpooled:
            return torch.stack([self[name] for name in self._names], 1)
        if self._tickets is None:
            return self.banks[0]
        whole, live = self.banks[0].view_as(self.banks[0]), self._tickets[0].live
        if whole.grad_fn is not None:
            whole.grad_fn.register_hook(lambda *_: live.fill(True))  # its gradient counts as one for every feature
        return whole

    @uncompiled
    def padded(self, name: str) -> tuple[Tensor, Tensor]:
        """Return a feature's rows padded with zeros, [batch, longest, dim], and a mask of the rows, [batch,
        longest]."""
        return padded(self[name], self._offsets(name))

    @uncompiled
    def nested(self, name: str) -> Tensor:
        """Return a feature's rows as a nested tensor of torch's jagged layout, [batch, (ids of a sample), dim]."""
        flat, offsets = self[name], self._offsets(name)
        lengths, begins = np.diff(offsets), torch.from_numpy((offsets - offsets[0]).astype(np.int64))
        return torch.nested.nested_tensor_from_jagged(
            flat, begins.to(flat.device), min_seqlen=int(lengths.min(initial=0)), max_seqlen=int(lengths.max(initial=0))
        )

    def _offsets(self, name: str) -> np.ndarray:
        """Return where each sample of a feature begins among its rows."""
        if not self._unpooled:
            raise ValueError(
                f"feature {name!r} is pooled: make an EmbeddingCollection, which returns a row for each id"
            )
        bank, column = self._all[name]
        inverse = self._ids[bank].inverse[column]
        if inverse is None:
            return self._offsets_of_bags(bank, column)
        return np.concatenate([[0], np.cumsum(np.diff(self._offsets_of_bags(bank, column))[inverse])])

    def _expanded(self, bank: int, column: int, rows: Tensor) -> Tensor:
        inverse = self._ids[bank].inverse[column]
        if inverse is None:
            return rows
        starts = self._offsets_of_bags(bank, column).astype(np.int64)
        begins, lengths = (starts[:-1] - starts[0])[inverse], np.diff(starts)[inverse]
        ends = np.cumsum(lengths)
        at = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(begins - (ends - lengths), lengths)
        return expand(rows, torch.from_numpy(at).to(rows.device))


def _marked(part: Tensor, live: list[bool], columns: Sequence[int]) -> Tensor:
    def mark(grad: Tensor) -> None:
        for column in columns:
            live[column] = True

    if part.requires_grad:
        part.register_hook(mark)
    return part


def shaped(flat: Tensor, ids: BankIds) -> tuple[Tensor, Tensor | None]:
    """Return a bank's output, [batch, features, dim] or unpooled [ids, dim], and its shared bags, [bags, dim]."""
    if not ids.pooled:
        return flat, None
    shape = ids.batch, ids.features, flat.shape[-1]
    if not ids.shares:
        return flat.view(shape), None
    return flat[: ids.samples].view(shape), flat[ids.samples :]


def looked_up(tickets: Sequence[Ticket]) -> list[Tensor | None]:
    """Gather and pool each bank. Return two a bank, its output and its shared bags or None."""
    out = list[Tensor | None]()
    for ticket in tickets:
        given = ticket.work.pooled.get(ticket.bank)
        flat = given[ticket.micro] if given else ticket.engine.banks[ticket.bank].pool(ticket.work, ticket.micro)
        out += shaped(flat, ticket.ids)
    return out


class Lookup(torch.autograd.Function):
    """Forward: look banks up. Backward: hand their gradients to the current step."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tickets: list[Ticket]) -> tuple[Tensor | None, ...]:
        ctx.tickets = tickets
        ctx.set_materialize_grads(False)
        out, stopped = looked_up(tickets), list[Tensor | None]()
        for number, ticket in enumerate(tickets):
            stopped += () if ticket.trained.any() else out[2 * number : 2 * number + 2]
        ctx.mark_non_differentiable(*(each for each in stopped if each is not None))
        return tuple(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        current = ctx.tickets[0].current
        hand_back(ctx.tickets, grads[::2], grads[1::2])
        current.dense.in_backward(current.engine.counters.steps)
        return current.anchor.new_empty(0), None


def hand_back(tickets: Sequence[Ticket], grads: Sequence[Tensor | None], of_bags: Sequence[Tensor | None]) -> None:
    """Give the current step the gradients of each bank and of its shared bags."""
    first = tickets[0]
    if first.used:
        raise RuntimeError(
            "backward ran twice over one batch: its rows were already updated. Sum the losses and call it once"
        )
    current, work = first.current, first.work
    current.require(work)
    first.used = work.micros[first.micro].returned = True
    for ticket, grad, bags in zip(tickets, grads, of_bags, strict=True):
        current.returned(ticket, grad, bags)
    current.backward_done(work)
    for ticket in tickets:
        ticket.release()


class Cut(torch.autograd.Function):
    """The features of these columns one by one, or their shared bags: stretches of rows of these sizes, or without sizes
    the second dimension. Backward records which of them got a gradient, which counts for all ids of its feature."""

    @staticmethod
    def forward(
        ctx: Any, bank: Tensor, ticket: Ticket, columns: Sequence[int], sizes: list[int] | None = None
    ) -> tuple[Tensor, ...]:
        ctx.ticket, ctx.shape, ctx.columns, ctx.sizes = ticket, bank.shape, columns, sizes
        ctx.set_materialize_grads(False)
        return tuple(bank.unbind(1) if sizes is None else bank.split(sizes))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *rows, dim = ctx.shape
        out = ctx.ticket.engine.device.empty(prod(rows), dim).view(ctx.shape)
        parts = out.unbind(1) if ctx.sizes is None else out.split(ctx.sizes)
        for column, part, grad in zip(ctx.columns, parts, grads, strict=True):
            if grad is None:
                part.zero_()  # autograd may add the gradient of the stacked output
            else:  # a gradient of the stacked output makes every feature live
                part.copy_(grad)
                ctx.ticket.live[column] = True
        return out, None, None, None
