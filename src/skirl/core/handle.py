"""The handle of row optimizers by which schedulers and checkpoints see them."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from skirl.core.groups import Groups, Setting

_LIVE = ("lr", "weight_decay")


class TorchHandle(torch.optim.Optimizer):
    """The row optimizers of a collection as a torch optimizer, with one param group for each pattern of tables.

    A group has `name` and `tables`. Its `lr` and `weight_decay` may be set, and take effect from the next backward on.
    Rows are updated in backward: `step` and `zero_grad` do nothing to them.

    >>> from skirl import Adam, SGD, Table
    >>> tables = [Table("user", 9, 4), Table("item", 9, 4)]
    >>> handle = TorchHandle(Groups(tables, {"user": Adam(lr=0.5), "*": SGD(lr=2.0)}))
    >>> schedule = torch.optim.lr_scheduler.LambdaLR(handle, [lambda step: 0.1**step, lambda step: 1.0])
    >>> schedule.step()
    >>> [(group["name"], group["tables"], group["lr"]) for group in handle.param_groups]
    [('user', ['user'], 0.05), ('*', ['item'], 2.0)]
    """

    def __init__(self, groups: Groups, at: str | torch.device = "cpu") -> None:
        self._groups: Groups | None = None
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
        fixed = [{field.name for field in fields(group.optimizer)} - set(_LIVE) for group in groups.all]
        self._fixed = [frozenset(names) for names in fixed]
        # Schedulers warn if they step before the optimizer has. Here backward is the optimizer's step.
        self._opt_called = True

    @property
    def anchor(self) -> torch.Tensor:
        """The parameter that a GradScaler sees: its gradient tells whether the rows' update was skipped in a step."""
        return self.param_groups[0]["params"][0]

    @property
    def lr(self) -> float:
        """The learning rate of the next backward, if all tables share one group; a ValueError otherwise."""
        if len(self.param_groups) > 1:
            raise ValueError("tables have several learning rates: read them from optimizer.param_groups")
        return float(self.param_groups[0]["lr"])

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
        assert self._groups is not None
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
        if self._groups is not None:
            raise ValueError(
                "rows have one group for each pattern that the collection was made with (optimizer={'PATTERN': ...}): give "
                "other parameters to an optimizer of torch"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore learning rates and weight decays. The groups must be the same as those saved."""
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
        """Only call the closure, as torch's optimizers do."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()
