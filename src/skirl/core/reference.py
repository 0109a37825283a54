"""The plain reference: training with every row in memory, in the simplest Python. `skirl verify` and the tests require
the library to match it bit for bit. Every operation on an array rounds once per element, in the dtype of the rows.
Numbers computed in float64 (Adam's step size, Adagrad's decayed rate) are rounded to that dtype before they meet a row.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from skirl.core.initial import Constant, Given, Initial, Normal, Uniform
from skirl.core.keys import key_of, row_of, table_of
from skirl.core.optim import FTRL, SGD, Adagrad, Adam, RowOptimizer, RowwiseAdagrad
from skirl.core.tables import Table

Row = NDArray[Any]
Bags = (
    tuple[Sequence[int], Sequence[int], Sequence[float] | None]
    | tuple[Sequence[int], Sequence[int], Sequence[float] | None, Sequence[int]]
)
"""The ids of a feature, the bags' offsets into them, and a weight for each id or None. If samples share bags, also the
bag of each sample."""


class Reference:
    """Tables that keep all their rows in one dict: key -> record, [weight | state] as the optimizer lays it out."""

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: RowOptimizer | Sequence[RowOptimizer],
        seed: int = 0,
        dtype: DTypeLike = np.float32,
    ) -> None:
        self.tables = list(tables)
        self.optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer] * len(self.tables)
        self.frozen: set[int] = set()
        self.seed = seed
        self.dtype = np.dtype(dtype)
        self.rows: dict[int, Row] = {}
        self.table_steps = [0] * len(self.tables)
        self._pending: list[Mapping[str, Bags]] = []

    @np.errstate(all="ignore")
    def forward(
        self, batch: Mapping[str, Bags], *, accumulate: bool = False, evaluate: bool = False
    ) -> dict[str, NDArray[Any]]:
        """Return the pooled output of each feature in the batch, [batch, dim]. accumulate: this is another micro-batch
        of the step that the last forward began. evaluate: change nothing."""
        if not evaluate:
            self._pending = [*self._pending, batch] if accumulate else [batch]
        out = {}
        for t, table in enumerate(self.tables):
            for feature in table.features:
                if feature not in batch:
                    continue
                ids, offsets, _, *inverse = batch[feature]
                scale = self._scale(table, batch[feature])
                keys = [key_of(t, int(i)) for i in ids]
                rows = self._records(t, keys, keep=not evaluate)
                pooled = np.zeros((len(offsets) - 1, table.dim), self.dtype)
                for bag in range(len(offsets) - 1):
                    acc = pooled[bag]
                    for place in range(offsets[bag], offsets[bag + 1]):
                        x = rows[keys[place]][: table.dim]
                        acc += x if scale is None else scale[place] * x
                out[feature] = pooled[np.array(inverse[0], np.int64)] if inverse else pooled
        return out

    @np.errstate(all="ignore")
    def backward(self, *grads: Mapping[str, NDArray[Any] | None], lr: float | None = None, shards: int = 1) -> None:
        """Update the rows of the last step from the gradients of its outputs, one mapping per micro-batch. Positions of
        a feature whose gradient is missing or None do not count; a row with no position that counts stays as it is. lr:
        of all tables in this step; None uses those of the optimizers. shards: how many, of equal size."""
        for t, table in enumerate(self.tables):
            if t in self.frozen:
                continue
            optimizer = self.optimizers[t] if lr is None else replace(self.optimizers[t], lr=lr)
            sums: dict[int, dict[int, Row]] = {}
            updated = False
            each = len(grads) // shards
            width = 1  # number of leaves of a shard
            while width < each:
                width *= 2
            for micro, (batch, grad) in enumerate(zip(self._pending, grads, strict=True)):
                terms: dict[int, list[Row | None]] = {}
                for feature in table.features:
                    if feature in batch:
                        go = grad.get(feature)
                        self._add_terms(terms, t, batch[feature], go)
                        updated = updated or go is not None
                for key, of_row in terms.items():
                    if any(term is not None for term in of_row):
                        leaf = micro // each * width + micro % each
                        sums.setdefault(key, {})[leaf] = self._sum(of_row, table.dim)
            self.table_steps[t] += updated
            for key, parts in sums.items():
                g = over_tree(parts, 0, shards * width)
                apply(optimizer, self.rows[key], g * g.dtype.type(1 / shards), self.table_steps[t])
        self._pending = []

    def _add_terms(self, terms: dict[int, list[Row | None]], t: int, bags: Bags, grad: NDArray[Any] | None) -> None:
        """Append what each position of a feature adds to the gradient of its row, in order; None without a gradient."""
        ids, offsets, _, *inverse = bags
        scale = self._scale(self.tables[t], bags)
        keys = [key_of(t, int(i)) for i in ids]
        if inverse and grad is not None:  # the gradient of a bag is the sum over its samples
            summed = np.zeros((len(offsets) - 1, self.tables[t].dim), self.dtype)
            for sample, bag in enumerate(inverse[0]):
                summed[bag] += np.asarray(grad[sample], self.dtype)
            grad = summed
        for bag in range(len(offsets) - 1):
            go = None if grad is None else np.asarray(grad[bag], self.dtype)
            for place in range(offsets[bag], offsets[bag + 1]):
                term = go if go is None or scale is None else scale[place] * go
                terms.setdefault(keys[place], []).append(term)

    def _sum(self, terms: list[Row | None], dim: int) -> Row:
        total: Row = np.zeros(dim, self.dtype)
        for begin in range(0, len(terms), 256):
            part: Row = np.zeros(dim, self.dtype)
            for term in terms[begin : begin + 256]:
                if term is not None:
                    part += term
            total += part
        return total

    def _scale(self, table: Table, bags: Bags) -> Row | None:
        """Return one factor per id: its weight (or 1), divided by the size of its bag for a mean. None if all are 1."""
        ids, offsets, weights, *_ = bags
        if table.pooling == "sum" and weights is None:
            return None
        scale: Row = np.ones(len(ids), self.dtype) if weights is None else np.array(weights, self.dtype)
        if table.pooling == "mean":
            sizes: Row = np.diff(offsets)
            scale = scale / np.repeat(sizes, sizes).astype(self.dtype)
        return scale

    def read(self, keys: Sequence[int] | NDArray[np.int64]) -> NDArray[Any]:
        """Return records by key, from tables of one dim. A row never used has its initial value, and is not kept."""
        rows = [
            self.rows[k] if k in self.rows else self._records(table_of(k), [k], keep=False)[k] for k in map(int, keys)
        ]
        return np.stack(rows)

    def _records(self, t: int, keys: Sequence[int], keep: bool) -> Mapping[int, Row]:
        """Return the records of these rows of table t; rows never used before have their initial values."""
        new = [key for key in dict.fromkeys(keys) if key not in self.rows]
        dim = self.tables[t].dim
        optimizer = self.optimizers[t]
        made = np.full((len(new), optimizer.width(dim)), optimizer.initial_state, self.dtype)
        made[:, :dim] = initial_values(self.tables[t].initial, new, dim, self.seed, self.dtype)
        fresh = dict(zip(new, made, strict=True))
        if keep:
            self.rows.update(fresh)
            return self.rows
        return ChainMap(fresh, self.rows)


def over_tree(parts: Mapping[int, Any], begin: int, end: int) -> Any:
    """Sum the leaves from begin to end (a power of two of them), each half first. Return None if no leaf has a part."""
    if end - begin == 1:
        return parts.get(begin)
    middle = (begin + end) // 2
    left, right = over_tree(parts, begin, middle), over_tree(parts, middle, end)
    if left is None or right is None:
        return right if left is None else left
    return left + right


def initial_values(
    initial: Initial, keys: Sequence[int], dim: int, seed: int, dtype: DTypeLike = np.float32
) -> NDArray[Any]:
    """Return the weights that rows have before their first update, [keys, dim]."""
    dtype = np.dtype(dtype)
    if isinstance(initial, Given):
        return initial.take(np.array([row_of(key) for key in keys], np.int64)).astype(dtype)
    if isinstance(initial, Constant):
        return np.full((len(keys), dim), initial.value, dtype)
    base = [_mix(key ^ _mix(seed)) for key in keys]
    d = np.arange(dim)
    count = (d // 2 + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = np.array(base, np.uint64).reshape(-1, 1) + count
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    u = np.where(d % 2 == 0, z >> np.uint64(40), z >> np.uint64(8) & np.uint64(0xFFFFFF)).astype(np.int64)
    if isinstance(initial, Uniform):
        return (u - 2**23).astype(dtype) * dtype.type(initial.bound / 2**23)
    assert isinstance(initial, Normal)
    return _quantiles()[u >> 8].astype(dtype) * dtype.type(initial.std)


@cache
def _quantiles() -> Row:
    return np.array([NormalDist().inv_cdf((i + 0.5) / 65536) for i in range(65536)], np.float32)


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def apply(optimizer: RowOptimizer, record: Row, g: Row, t: int) -> None:
    """Update one record with its summed gradient, at the table's update number t (from 1)."""
    number = g.dtype.type
    if optimizer.clip is not None:
        norm = np.sqrt(tree_sum(g * g))
        if norm > number(optimizer.clip):
            g = g * (number(optimizer.clip) / norm)
    w, state = record[: len(g)], record[len(g) :]
    if optimizer.weight_decay:
        g = g + number(optimizer.weight_decay) * w
    match optimizer:
        case SGD(lr=lr, momentum=momentum):
            if momentum:
                state[:] = number(momentum) * state + g
                g = state
            w[:] = w - number(optimizer.numbers(lr, 0.0, t)[2]) * g
        case Adagrad(lr=lr, lr_decay=decay, eps=eps):
            state[:] = state + g * g
            w[:] = w - number(lr / (1 + (t - 1) * decay)) * (g / (np.sqrt(state) + number(eps)))
        case RowwiseAdagrad(lr=lr, eps=eps):
            state[0] = state[0] + tree_sum(g * g) / number(len(g))
            w[:] = w - number(lr) / (np.sqrt(state[0]) + number(eps)) * g
        case Adam(lr=lr, betas=(b1, b2), eps=eps):
            m, v = state[: len(g)], state[len(g) :]
            m[:] = m + (g - m) * number(1 - b1)
            v[:] = v + (g * g - v) * number(1 - b2)
            size = number(lr * sqrt(1 - b2**t) / (1 - b1**t))
            w[:] = w - size * (m / (np.sqrt(v) + number(eps)))
        case FTRL():
            z, n = state[: len(g)], state[len(g) :]
            alpha, beta, l1, l2 = map(number, (optimizer.lr, optimizer.beta, optimizer.l1, optimizer.l2))
            begun = number(0) - ((beta / alpha + l2) * w + np.sign(w) * l1)  # the z of a row without a gradient so far
            before, after = np.sqrt(n), np.sqrt(n + g * g)
            z[:] = np.where(n > 0, z, begun) + (g - (after - before) / alpha * w)
            n[:] = n + g * g
            within = np.where(z > l1, l1, np.where(z < -l1, -l1, z))
            w[:] = (within - z) / ((beta + after) / alpha + l2)
        case _:  # added by a user: its rule is all that says what it does
            rule, n = optimizer.rule, [number(x) for x in optimizer.numbers(optimizer.lr, 0.0, t)[2:]]
            if rule.one:
                w[:], state[0] = rule.step(w, g, state[0], tree_sum(g * g) / number(len(g)), n)
            else:
                new = rule.step(w, g, *np.split(state, max(1, rule.states))[: rule.states], n)
                record[:] = np.concatenate(new) if rule.states else new


def tree_sum(values: Row) -> Any:
    """Sum by halves: add the upper half to the lower one until one number is left."""
    v = values.copy()
    while len(v) > 1:
        half = 1 << (len(v) - 1).bit_length() - 1
        upper = v[half:]
        v = v[:half].copy()
        v[: len(upper)] += upper
    return v[0]
