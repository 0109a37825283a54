"""Row optimizers: rules, parameters, and the layout of a record (weight, then state). Kernels of all devices are
compiled from a rule. Numbers come first in a product: `n[0] * g`. Beside +, - and * it may call `root`, `divide`,
`above` and `zero`, which round once on every device."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from math import inf, sqrt
from numbers import Real
from typing import Any, ClassVar, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from skirl.core import OptimizerName


class Rule(NamedTuple):
    step: Callable[..., Any]
    """step(w, g, *states, n), or step(w, g, s, square, n) where the state is one number: `square` is the mean of g * g."""
    states: int
    """Number of states that are as long as the weight: up to 2."""
    one: bool


def root(x: Any) -> Any:
    return np.sqrt(x)


def divide(a: Any, b: Any) -> Any:
    return a / b


def above(a: Any, b: Any, then: Any, other: Any) -> Any:
    """Return `then` where a > b, and `other` elsewhere, including where one of them is NaN."""
    return np.where(a > b, then, other)


def zero(like: Any) -> Any:
    return np.zeros_like(like)


def sgd(w, g, n):
    return w - n[0] * g


def momentum(w, g, b, n):
    b = n[1] * b + g
    return w - n[0] * b, b


def adagrad(w, g, s, n):
    s = s + g * g
    return w - n[0] * divide(g, n[1] + root(s)), s


def rowwise_adagrad(w, g, s, square, n):
    s = s + square
    return w - divide(n[0], root(s) + n[1]) * g, s


def adam(w, g, m, v, n):
    m = m + n[1] * (g - m)
    v = v + n[2] * (g * g - v)
    return w - n[0] * divide(m, n[3] + root(v)), m, v


def ftrl(w, g, z, squares, n):
    lr, beta, l1, l2, nil = n[0], n[1], n[2], n[3], zero(w)
    sign = above(w, nil, l1, above(nil, w, -l1, nil))
    z = above(squares, nil, z, nil - ((divide(beta, lr) + l2) * w + sign))  # without a gradient yet, z follows from w
    before = root(squares)
    squares = squares + g * g
    after = root(squares)
    z = z + (g - divide(after - before, lr) * w)
    within = above(z, l1, l1, above(-l1, z, -l1, z))
    return divide(within - z, l2 + divide(beta + after, lr)), z, squares


COLUMNS = 8
"""Numbers of a table that the kernels take: clip, weight decay, and up to six of its rule."""


@dataclass(frozen=True)
class RowOptimizer:
    """The base of all row optimizers. Numbers are 0 or more."""

    update: ClassVar[Callable[..., Any]]
    states: ClassVar[tuple[str, ...]] = ()
    weight_follows_state: ClassVar[bool] = False
    """True if a row's weight follows from its state and the learning rate: a new rate alone would change it."""
    lr: float
    clip: float | None = None
    _: KW_ONLY
    weight_decay: float = 0.0

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def rule(self) -> Rule:
        one = self.state_width(2) == 1
        return Rule(type(self).update, 0 if one else len(self.state_names), one)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the parts of a record after the weight, in order, as torch calls them."""
        return self.states

    @property
    def initial_state(self) -> float:
        return 0.0

    @property
    def counts_steps(self) -> bool:
        """True if an update depends on how many its table has had. A row's state then needs that count."""
        return self.own_numbers(1.0, 1) != self.own_numbers(1.0, 2)

    def state_width(self, dim: int) -> int:
        return len(self.state_names) * dim

    def width(self, dim: int) -> int:
        return dim + self.state_width(dim)

    @property
    def by_number(self) -> bool:
        """Whether each number of a row is trained by itself, as if the others were not there."""
        return self.clip is None and self.state_width(2) != 1

    def unpack(self, dim: int) -> dict[str, slice]:
        """Return the slice of each part of a record, by name: first the weight."""
        parts = {"weight": slice(0, dim)}
        each = self.state_width(dim) // max(1, len(self.state_names))
        for i, name in enumerate(self.state_names):
            parts[name] = slice(dim + i * each, dim + (i + 1) * each)
        return parts

    def numbers_of(self, dim: int, columns: slice) -> NDArray[np.int64]:
        """Return which numbers of a record one has that has only some columns of the row and of each part of its state."""
        return np.concatenate([np.arange(part.start, part.stop)[columns] for part in self.unpack(dim).values()])

    def numbers(self, lr: float, weight_decay: float, step: int) -> tuple[float, ...]:
        """Return what the kernels need for one update of one table, COLUMNS numbers: clip, weight decay, the rule's own."""
        # A table without a gradient may still be at step 0. Its numbers are never read, but must not divide by zero.
        own = self.own_numbers(float(lr), max(step, 1))
        clip = inf if self.clip is None else float(self.clip)
        return clip, float(weight_decay), *own, *[0.0] * (COLUMNS - 2 - len(own))

    def own_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """Return the rule's numbers `n` for a table's update number `step`: up to six, the learning rate by default."""
        return (lr,)

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (float, "float") and not (isinstance(value, Real) and 0 <= float(value) < inf):
                raise ValueError(f"{name}: {field.name} is {value!r}, set it to a finite number, 0 or more")
        if self.clip is not None and not (isinstance(self.clip, Real) and float(self.clip) > 0):
            raise ValueError(f"{name}: clip is {self.clip!r}, set it to a norm above 0, or to None for no clipping")


@dataclass(frozen=True)
class SGD(RowOptimizer):
    """w = w - lr * g, as in torch.optim.SGD. Without momentum there is no state: a record is the weight alone.

    With momentum m: b = m * b + g; w = w - lr * b. A record is twice the weight.
    b and w change only if the row is in the batch. (With a sparse gradient, torch's own moves every row that ever had one.)

    **Arguments**

    - `lr`: the learning rate, until a scheduler changes it; 0.01 is only a first try.
    - `clip`: a row's summed gradient is scaled down to this norm, that of one row and never of the model; None for none.
    - `weight_decay`: L2 as in torch: `weight_decay * w` is added to the gradient after `clip`. Only rows of the batch decay.
    - `momentum`: m above, 0 or more and below 1.
    """

    update = staticmethod(sgd)
    lr: float = 0.01
    _: KW_ONLY
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.momentum < 1:
            raise ValueError(f"{self.name}: momentum is {self.momentum}, set it to 0 or more and below 1")

    @property
    def name(self) -> str:
        return f"{type(self).__name__} with momentum" if self.momentum else type(self).__name__

    @property
    def rule(self) -> Rule:
        return Rule(momentum, 1, False) if self.momentum else super().rule

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def own_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        return (lr, self.momentum) if self.momentum else (lr,)


@dataclass(frozen=True)
class Adagrad(RowOptimizer):
    """s = s + g*g; w = w - clr * (g / (sqrt(s) + eps)), as in torch.optim.Adagrad.

    clr = lr / (1 + (t - 1) * lr_decay), where t is the table's count of updates. A record is twice the weight.

    **Arguments**

    - `lr`: the learning rate; 0.01 as in torch.
    - `lr_decay`: how fast the learning rate falls with the table's updates.
    - `eps`: keeps the division finite; 1e-10 as in torch.
    - `initial_accumulator_value`: where each sum of squares starts.
    - `clip`, `weight_decay`: as for SGD.
    """

    update = staticmethod(adagrad)
    states: ClassVar[tuple[str, ...]] = ("sum",)
    lr: float = 0.01
    lr_decay: float = 0.0
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    @property
    def initial_state(self) -> float:
        return float(self.initial_accumulator_value)

    def own_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        return lr / (1 + (step - 1) * self.lr_decay), self.eps


@dataclass(frozen=True)
class RowwiseAdagrad(RowOptimizer):
    """s = s + mean(g*g); w = w - lr / (sqrt(s) + eps) * g, as in FBGEMM's EXACT_ROWWISE_ADAGRAD.

    It keeps one number of state per row, so a record of 64 weights is 65 numbers: Adagrad's adaptation for 1.6% more
    traffic than SGD.

    **Arguments**

    - `lr`: the learning rate; 0.01 as in FBGEMM.
    - `eps`: keeps the division finite; 1e-8 as in FBGEMM.
    - `clip`, `weight_decay`: as for SGD. FBGEMM's CUDA kernel decays in the same way; its CPU operator (1.8.0) does not.
    """

    update = staticmethod(rowwise_adagrad)
    states: ClassVar[tuple[str, ...]] = ("sum",)
    lr: float = 0.01
    eps: float = 1e-8

    def state_width(self, dim: int) -> int:
        return 1

    def own_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        return lr, self.eps


@dataclass(frozen=True)
class Adam(RowOptimizer):
    """m += (g - m) * (1 - b1); v += (g*g - v) * (1 - b2); w = w - size * (m / (sqrt(v) + eps)), as in
    torch.optim.SparseAdam.

    size = lr * sqrt(1 - b2**t) / (1 - b1**t), where t is the table's count of updates. The moments of rows outside the
    batch do not decay. A record is three times the weight.

    **Arguments**

    - `lr`: the learning rate; 0.001 as in torch.
    - `betas`: how slowly the two moments change, each 0 or more and below 1.
    - `eps`: keeps the division finite.
    - `clip`, `weight_decay`: as for SGD: L2 as in torch.optim.Adam, not decoupled as in AdamW.
    """

    update = staticmethod(adam)
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "betas", tuple(self.betas))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"Adam: betas is {self.betas}, set both to 0 or more and below 1")

    def own_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        b1, b2 = self.betas
        return lr * sqrt(1 - b2**step) / (1 - b1**step), 1 - b1, 1 - b2, self.eps


@dataclass(frozen=True)
class FTRL(RowOptimizer):
    r"""FTRL-Proximal for each number of a row, as in McMahan et al. (Ad Click Prediction, KDD 2013, algorithm 1).

    s = (sqrt(n + g*g) - sqrt(n)) / lr; z = z + (g - s * w); n = n + g*g;
    w = 0 where \|z\| <= l1, else (sign(z) * l1 - z) / ((beta + sqrt(n)) / lr + l2). A record is three times the weight.

    The paper's weights start at 0, as with `Table(init=skirl.Constant(0.0))`. A row that starts at another w, or is
    imported, starts with the z that gives its w in this formula, and so keeps its w.

    **Arguments**

    - `lr`: the paper's alpha, above 0; 0.1 is only a first try. Schedules are refused: w follows from z, n and lr, so a new
      lr alone would move rows.
    - `beta`: the larger it is, the smaller the first steps; 1 as in the paper.
    - `l1`: the larger it is, the more numbers are exactly 0; 0 for none.
    - `l2`: pulls numbers towards 0 from the first step on, without entering z; 0 for none.
    - `clip`, `weight_decay`: as for SGD; the paper has `l2` instead.
    """

    update = staticmethod(ftrl)
    states: ClassVar[tuple[str, ...]] = ("z", "n")
    weight_follows_state: ClassVar[bool] = True
    lr: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def follows(self, weight: NDArray[Any], z: NDArray[Any], n: NDArray[Any]) -> bool:
        """Return whether weights follow from this state with this lr, beta, l1 and l2. Skip those without gradients."""
        weight, z, n = (np.asarray(part, np.float64) for part in (weight, z, n))
        of_state = (np.sign(z) * self.l1 - z) / ((self.beta + np.sqrt(n)) / self.lr + self.l2)
        of_state[np.abs(z) <= self.l1] = 0
        return bool(np.allclose(weight[n > 0], of_state[n > 0], rtol=0.01, atol=1e-6))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lr > 0:
            raise ValueError("FTRL: lr is 0, set it above 0; to keep rows as they are, freeze their table")
        if not self.beta + self.l2 > 0:
            raise ValueError("FTRL: beta and l2 are 0, set one above 0: w would be 0 / 0 where a gradient is 0")

    def own_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        return lr, self.beta, self.l1, self.l2


_MAKERS = (RowwiseAdagrad, SGD, partial(SGD, momentum=0.9), Adagrad, Adam, FTRL)
ROW_OPTIMIZERS: dict[str, Callable[..., RowOptimizer]] = dict(zip(get_args(OptimizerName), _MAKERS, strict=True))


def row_optimizer(name: str) -> Callable[..., RowOptimizer]:
    for short, make in ROW_OPTIMIZERS.items():
        if name in (short, make().name):
            return make
    raise ValueError(f"optimizer is {name!r}: set it to one of {', '.join(ROW_OPTIMIZERS)}")
