"""Row optimizers: their parameters, and the layout of a row's record, weight and state side by side. The arithmetic is
in `engine/kernels/`, and once more in `core/reference.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

KIND_SGD, KIND_ADAGRAD, KIND_ROWWISE_ADAGRAD, KIND_ADAM = 0, 1, 2, 3


@dataclass(frozen=True)
class _Rule:
    """What all row optimizers share: a learning rate, a clip and the layout of a record."""

    kind: ClassVar[int]
    """Which branch of the update kernels it takes."""
    state_names: ClassVar[tuple[str, ...]]
    """Parts of a record after the weight, in order, by the names that torch gives them."""
    lr: float
    clip: float | None

    @property
    def clip_norm(self) -> float:
        """`clip` as the kernels take it: inf when there is none."""
        return inf if self.clip is None else float(self.clip)

    @property
    def initial_state(self) -> float:
        """The first value of every number of a row's state."""
        return 0.0

    @property
    def counts_steps(self) -> bool:
        """Whether an update depends on how many its table had before: a row's state needs that number then."""
        return False

    def state_width(self, dim: int) -> int:
        """How many numbers of state a row of `dim` weights has."""
        return len(self.state_names) * dim

    def width(self, dim: int) -> int:
        """How many numbers a record has.

        >>> SGD().width(64), RowwiseAdagrad().width(64), Adagrad().width(64), Adam().width(64)
        (64, 65, 128, 192)
        """
        return dim + self.state_width(dim)

    def unpack(self, dim: int) -> dict[str, slice]:
        """Where each part of a record is.

        >>> Adam().unpack(8)
        {'weight': slice(0, 8, None), 'exp_avg': slice(8, 16, None), 'exp_avg_sq': slice(16, 24, None)}
        """
        parts = {"weight": slice(0, dim)}
        each = self.state_width(dim) // max(1, len(self.state_names))
        for i, name in enumerate(self.state_names):
            parts[name] = slice(dim + i * each, dim + (i + 1) * each)
        return parts

    def scalars(self, lr: float, table_steps: NDArray[np.int64], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """What the kernels need for each table, [tables, k] in the dtype of the rows, rounded once from float64.

        table_steps: how many updates each table has had, this one included.

        >>> SGD().scalars(0.5, np.array([1, 7])).tolist()
        [[0.5], [0.5]]
        """
        # A table without a gradient may still be at 0; its entry is never read, and must not divide by zero.
        steps = np.maximum(np.asarray(table_steps, np.int64), 1)
        at = {t: self._scalars_at(float(lr), t) for t in set(steps.tolist())}  # most tables have had equally many
        return np.array([at[t] for t in steps.tolist()], dtype).reshape(len(steps), -1)

    def _scalars_at(self, lr: float, step: int) -> tuple[float, ...]:
        raise NotImplementedError

    def _check(self, **least: float) -> None:
        """Refuse parameters that are below their least value or not finite."""
        name = type(self).__name__
        for field, bound in least.items():
            value = getattr(self, field)
            if not (isfinite(value) and value >= bound):
                raise ValueError(f"{name}: {field} is {value}, set it to a finite number, {bound:g} or more")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"{name}: clip is {self.clip}, set it to a norm above 0, or to None for no clipping")


@dataclass(frozen=True)
class SGD(_Rule):
    """w = w - lr * g, as torch.optim.SGD without momentum. It has no state: a record is the weight alone.

    **Arguments**

    - `lr`: the learning rate, until a scheduler changes it; 0.01 is only a first try.
    - `clip`: a row's summed gradient is scaled down to this norm; None, the default of all row optimizers, leaves
      gradients as they are. It is the norm of one row, never that of the model, whose rows are not all at hand.

    >>> SGD(lr=-1)
    Traceback (most recent call last):
    ValueError: SGD: lr is -1, set it to a finite number, 0 or more
    """

    kind: ClassVar[int] = KIND_SGD
    state_names: ClassVar[tuple[str, ...]] = ()
    lr: float = 0.01
    clip: float | None = None

    def __post_init__(self) -> None:
        self._check(lr=0)

    def _scalars_at(self, lr: float, step: int) -> tuple[float, ...]:
        return (lr,)


@dataclass(frozen=True)
class Adagrad(_Rule):
    """s = s + g*g; w = w - clr * (g / (sqrt(s) + eps)), as torch.optim.Adagrad.

    clr = lr / (1 + (t - 1) * lr_decay), t the table's count of updates. A record is twice the weight.

    **Arguments**

    - `lr`: the learning rate; 0.01 as in torch.
    - `lr_decay`: how fast it falls with the table's updates; 0 as in torch, since schedulers do this for all tables at
      once.
    - `eps`: keeps the division finite; 1e-10 as in torch.
    - `initial_accumulator_value`: where each sum of squares starts; 0 as in torch. Above 0 it makes the first steps
      smaller.
    - `clip`: as for SGD.
    """

    kind: ClassVar[int] = KIND_ADAGRAD
    state_names: ClassVar[tuple[str, ...]] = ("sum",)
    lr: float = 0.01
    lr_decay: float = 0.0
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0
    clip: float | None = None

    def __post_init__(self) -> None:
        self._check(lr=0, lr_decay=0, eps=0, initial_accumulator_value=0)

    @property
    def initial_state(self) -> float:
        return float(self.initial_accumulator_value)

    @property
    def counts_steps(self) -> bool:
        return self.lr_decay != 0

    def _scalars_at(self, lr: float, step: int) -> tuple[float, ...]:
        return lr / (1 + (step - 1) * self.lr_decay), self.eps


@dataclass(frozen=True)
class RowwiseAdagrad(_Rule):
    """s = s + mean(g*g); w = w - lr / (sqrt(s) + eps) * g, as FBGEMM's EXACT_ROWWISE_ADAGRAD.

    One number of state per row, so a record of 64 weights is 65 numbers: Adagrad's adaptation at 1.6% more traffic than
    SGD.

    **Arguments**

    - `lr`: the learning rate; 0.01 as in FBGEMM.
    - `eps`: keeps the division finite; 1e-8 as in FBGEMM.
    - `weight_decay`: L2: `weight_decay * w` is added to the gradient first; 0 for none. FBGEMM's CUDA kernel does the
      same; its CPU operator (1.8.0) ignores the parameter. Only rows of the batch decay.
    - `clip`: as for SGD.
    """

    kind: ClassVar[int] = KIND_ROWWISE_ADAGRAD
    state_names: ClassVar[tuple[str, ...]] = ("sum",)
    lr: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float | None = None

    def __post_init__(self) -> None:
        self._check(lr=0, eps=0, weight_decay=0)

    def state_width(self, dim: int) -> int:
        return 1

    def _scalars_at(self, lr: float, step: int) -> tuple[float, ...]:
        return lr, self.eps, self.weight_decay


@dataclass(frozen=True)
class Adam(_Rule):
    """m += (g - m) * (1 - b1); v += (g*g - v) * (1 - b2); w = w - size * (m / (sqrt(v) + eps)), as
    torch.optim.SparseAdam.

    size = lr * sqrt(1 - b2**t) / (1 - b1**t), t the table's count of updates. The moments of rows that are not in the
    batch do not decay. A record is three times the weight.

    **Arguments**

    - `lr`: the learning rate; 0.001 as in torch.
    - `betas`: how slowly the two moments change, each 0 or more and below 1; (0.9, 0.999) as in torch.
    - `eps`: keeps the division finite; 1e-8 as in torch.
    - `clip`: as for SGD.

    >>> Adam(betas=(0.9, 1.0))
    Traceback (most recent call last):
    ValueError: Adam: betas is (0.9, 1.0), set both to 0 or more and below 1
    """

    kind: ClassVar[int] = KIND_ADAM
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip: float | None = None

    def __post_init__(self) -> None:
        self._check(lr=0, eps=0)
        object.__setattr__(self, "betas", tuple(self.betas))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"Adam: betas is {self.betas}, set both to 0 or more and below 1")

    @property
    def counts_steps(self) -> bool:
        return True

    def _scalars_at(self, lr: float, step: int) -> tuple[float, ...]:
        b1, b2 = self.betas
        return lr * sqrt(1 - b2**step) / (1 - b1**step), 1 - b1, 1 - b2, self.eps


RowOptimizer = SGD | Adagrad | RowwiseAdagrad | Adam
ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    "rowwise-adagrad": RowwiseAdagrad,
    "sgd": SGD,
    "adagrad": Adagrad,
    "adam": Adam,
}


def row_optimizer(name: str) -> type[RowOptimizer]:
    """The row optimizer of a name, as flags or as files write it.

    >>> row_optimizer("rowwise-adagrad") is row_optimizer("RowwiseAdagrad")
    True
    """
    for short, kind in ROW_OPTIMIZERS.items():
        if name in (short, kind.__name__):
            return kind
    raise ValueError(f"optimizer is {name!r}: set it to one of {', '.join(ROW_OPTIMIZERS)}")


class TorchHandle(torch.optim.Optimizer):
    """The rows' learning rate as a torch optimizer, so that torch's schedulers drive it and its state_dict keeps it.

    Rows are updated in backward, with the learning rate that is set here at that moment; step() does nothing.

    >>> handle = TorchHandle(SGD(lr=0.5), torch.zeros(1, requires_grad=True))
    >>> schedule = torch.optim.lr_scheduler.ExponentialLR(handle, gamma=0.1)
    >>> schedule.step()
    >>> handle.lr
    0.05
    """

    def __init__(self, optimizer: RowOptimizer, anchor: torch.Tensor) -> None:
        super().__init__([anchor], {"lr": optimizer.lr})
        # Schedulers warn when no step() came before theirs. Here backward is the step.
        self._opt_called = True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a GradScaler asks before its step: refuse one that the rows' gradients were not unscaled by."""
        if self.param_groups[0]["params"][0].grad is None:
            raise RuntimeError(
                "scaler.step(embeddings.optimizer): the rows do not know this GradScaler, and were trained with scaled "
                "gradients. Pass it to the embeddings, EmbeddingBagCollection(..., grad_scaler=scaler), or set "
                "embeddings.grad_scaler = scaler before the first backward"
            )
        return False

    @property
    def lr(self) -> float:
        """The learning rate of the next backward."""
        return float(self.param_groups[0]["lr"])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do nothing, but call the closure as torch's optimizers do."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()
