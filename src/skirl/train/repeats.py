"""Repeats of lists in the batches of a run: the ratio of ids in samples to those that are looked up."""

from collections.abc import Sequence
from typing import Any


class Repeats:
    """Counts of ids in samples, and of those that are looked up: once for each list.

    >>> import torch
    >>> from skirl import KeyedJagged
    >>> repeats = Repeats(["seen"])
    >>> repeats.add(KeyedJagged(["seen"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]), strides=[2],
    ...                         inverse={"seen": torch.tensor([0, 0, 0, 1])}))
    >>> round(repeats.factor(), 2)
    2.33
    """

    def __init__(self, lists: Sequence[str] = ()) -> None:
        self._lists = frozenset(lists)
        self.ids = self.held = 0
        """ids: those of samples; held: those looked up, where repeated lists occur once."""

    def add(self, sparse: Any) -> None:
        """Count the ids of a batch."""
        if not self._lists or not hasattr(sparse, "groups"):
            return
        inverse = {name: of for names, of in sparse.groups.items() for name in names}
        offsets, first = sparse.offsets(), 0
        for name, bags in zip(sparse.keys(), sparse.stride_per_key(), strict=True):
            if name in self._lists:
                ids = held = int(offsets[first + bags] - offsets[first])
                if name in inverse:
                    ids = int(offsets[first : first + bags + 1].diff()[inverse[name].long()].sum())
                self.ids += ids
                self.held += held
            first += bags

    def factor(self, since: tuple[int, int] = (0, 0)) -> float | None:
        """Return the ratio of ids in samples to those looked up, or None if no list has ever repeated."""
        if self.ids == self.held:
            return None
        return (self.ids - since[0]) / max(1, self.held - since[1])

    @property
    def counted(self) -> tuple[int, int]:
        """`ids` and `held`, for `since`."""
        return self.ids, self.held

    def state_dict(self) -> dict[str, int]:
        """Return the state for a checkpoint."""
        return {"ids": self.ids, "held": self.held}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the state of a checkpoint."""
        self.ids, self.held = state["ids"], state["held"]
