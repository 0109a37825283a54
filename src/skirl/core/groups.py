"""The row optimizer of each table, one for all or one for each pattern of names, and their face for torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from skirl.core.optim import COLUMNS, RowOptimizer
from skirl.core.tables import Table

RowOptimizers = RowOptimizer | Mapping[str, RowOptimizer]
"""One row optimizer for all tables, or one for each pattern; the first pattern that matches a table's name counts."""


def _called(given: object) -> str:
    """Describe a wrong argument: 'the class X' for a class, 'a X' for an object of it."""
    kind = given if isinstance(given, type) else type(given)
    return f"{'the class' if kind is given else 'a'} {kind.__module__}.{kind.__name__}".replace("builtins.", "")


class Group(NamedTuple):
    name: str
    """The pattern; `*` if one optimizer is for all."""
    optimizer: RowOptimizer
    tables: tuple[int, ...]


class Setting(NamedTuple):
    """The settings of a group that may change between two steps."""

    lr: float
    weight_decay: float


class Groups(Sequence[RowOptimizer]):
    def __init__(self, tables: Sequence[Table], optimizer: RowOptimizers) -> None:
        by_name = optimizer if isinstance(optimizer, Mapping) else {"*": optimizer}
        for name, rule in by_name.items():
            if not isinstance(rule, RowOptimizer):
                what = f"optimizer[{name!r}]" if isinstance(optimizer, Mapping) else "optimizer"
                raise TypeError(
                    f"{what} is {_called(rule)}: rows have their own, set it to one such as skirl.SGD(lr=0.1), "
                    "skirl.Adagrad, skirl.RowwiseAdagrad, skirl.Adam or skirl.FTRL"
                )
        self.names = tuple(table.name for table in tables)
        first = [next((p for p in by_name if _matches(table.name, p)), None) for table in tables]
        if None in first:
            raise ValueError(
                f"optimizer has no pattern for table {self.names[first.index(None)]!r}: add its name, or '*' for all others"
            )
        for name in by_name:
            if name not in first:
                known = ", ".join(map(repr, self.names))
                raise ValueError(
                    f"optimizer has {name!r}, which is not the first match of any table: there are {known}"
                )
        self.all = tuple(
            Group(name, rule, tuple(t for t, chosen in enumerate(first) if chosen == name))
            for name, rule in by_name.items()
        )
        order = list(by_name)
        self.of = [order.index(str(name)) for name in first]

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, table: Any) -> Any:
        return self.all[self.of[table]].optimizer

    def scalars(
        self, tables: Sequence[int], settings: Sequence[Setting], steps: NDArray[np.int64], dtype: DTypeLike
    ) -> NDArray[Any]:
        """Return the numbers that the kernels of one bank need, [all tables, COLUMNS] in the dtype of the rows; zeros
        for tables outside the bank. steps: number of updates that each table has had, including this one."""
        numbers = np.zeros((len(self), COLUMNS), dtype)
        alike = dict[tuple[int, int], list[int]]()
        for t, step in zip(tables, steps[list(tables)].tolist(), strict=True):
            alike.setdefault((self.of[t], step), []).append(t)
        for (group, step), members in alike.items():
            numbers[members] = np.array(self.all[group].optimizer.numbers(*settings[group], step), dtype)
        return numbers


def matching(pattern: str, names: Sequence[str]) -> list[int]:
    found = [i for i, name in enumerate(names) if _matches(name, pattern)]
    if not found:
        raise ValueError(f"no table {pattern!r}: there are {', '.join(map(repr, names))}")
    return found


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


class TorchHandle(torch.optim.Optimizer):
    """The row optimizers of a collection as a torch optimizer, with one param group for each pattern of tables. A group
    has `name` and `tables`. Its `lr` and `weight_decay` may be set, and take effect from the next backward on."""

    def __init__(self, groups: Groups, at: str | torch.device = "cpu") -> None:
        super().__init__(
            [
                {
                    "params": [torch.zeros((), device=at, requires_grad=True)],  # torch wants one in each group
                    "lr": group.optimizer.lr,
                    "weight_decay": group.optimizer.weight_decay,
                    "name": group.name,
                    "tables": [groups.names[t] for t in group.tables],
                }
                for group in groups.all
            ],
            {},
        )
        self._groups = groups
        self._checked = [Setting(group.optimizer.lr, group.optimizer.weight_decay) for group in groups.all]
        self._fixed = [{of.name for of in fields(group.optimizer)} - {"lr", "weight_decay"} for group in groups.all]
        # Schedulers warn if they step before the optimizer has. Here backward is the optimizer's step.
        self._opt_called = True

    @property
    def anchor(self) -> torch.Tensor:
        """The parameter that a GradScaler sees: its gradient tells whether the rows' update was skipped in a step."""
        return self.param_groups[0]["params"][0]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False, as a GradScaler asks before its step; raise if it has not unscaled the rows' gradients."""
        if self.anchor.grad is None:
            raise RuntimeError(
                "scaler.step(embeddings.optimizer): no gradient of the rows was unscaled. If they are frozen, leave this "
                "out; otherwise they do not know this GradScaler, and were trained with scaled gradients: pass it to the "
                "embeddings, EmbeddingBagCollection(..., grad_scaler=scaler), or set embeddings.grad_scaler = scaler before "
                "the first backward"
            )
        return False

    def settings(self) -> list[Setting]:
        """Return the settings of each group for the next backward, or raise if one was set that may not change."""
        for i, (group, fixed) in enumerate(zip(self.param_groups, self._fixed, strict=True)):
            if not fixed.isdisjoint(group):
                name = min(fixed & group.keys())
                raise ValueError(
                    f"{name} of the group {group['name']!r} was set: it is fixed when the collection is made, and only lr "
                    "and weight_decay may change"
                )
            now = Setting(float(group["lr"]), float(group["weight_decay"]))
            if now != self._checked[i]:
                rule = self._groups.all[i].optimizer
                replace(rule, lr=now.lr, weight_decay=now.weight_decay)  # raises if a value is invalid
                if rule.weight_follows_state and now.lr != rule.lr:
                    raise ValueError(
                        f"lr of the group {group['name']!r} is {now.lr:g} and was {rule.lr:g}: {rule.name} computes rows "
                        "from their state and lr, so a new lr alone would move all of them. Keep this group out of "
                        "schedules: give LambdaLR the factor 1 for it"
                    )
                self._checked[i] = now
        return list(self._checked)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse other parameters: nothing would ever update them."""
        if hasattr(self, "_groups"):  # else torch adds the groups that it was made with
            raise ValueError(
                "rows have one group for each pattern that the collection was made with (optimizer={'PATTERN': ...}): give "
                "other parameters to an optimizer of torch"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        both = state_dict["param_groups"], self.param_groups
        saved, here = ([(group.get("name"), group.get("tables")) for group in groups] for groups in both)
        if saved != here:
            raise ValueError(
                f"the state has the groups {[name for name, _ in saved]} of tables {[t for _, t in saved]}, but this "
                f"collection has {[name for name, _ in here]} of {[t for _, t in here]}: make the collection with the same "
                "optimizer="
            )
        super().load_state_dict(state_dict)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()
