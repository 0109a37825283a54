"""How often lists repeat in the batches of a run: ids that samples have, over ids that are looked up."""

from collections.abc import Sequence
from typing import Any


class Repeats:
    """Counts them.

    **Arguments**

    - `lists`: the features that count: those with any number of ids a sample.

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
        """That samples have, and that batches have."""

    def add(self, sparse: Any) -> None:
        """Count those of a batch."""
        if not self._lists or not hasattr(sparse, "groups"):
            return
        inverse = {name: of for names, of in sparse.groups.items() for name in names}
        offsets, first = sparse.offsets(), 0
        for name, bags in zip(sparse.keys(), sparse.stride_per_key(), strict=True):
            if name in self._lists:
                held = int(offsets[first + bags] - offsets[first])
                self.held += held
                if name in inverse:
                    held = int(offsets[first : first + bags + 1].diff()[inverse[name].long()].sum())
                self.ids += held
            first += bags

    def factor(self, since: tuple[int, int] = (0, 0)) -> float | None:
        """How many times as many ids samples had as batches; None where no list has ever repeated.

        **Arguments**

        - `since`: `ids` and `held` where to begin.
        """
        if self.ids == self.held:
            return None
        return (self.ids - since[0]) / max(1, self.held - since[1])

    @property
    def counted(self) -> tuple[int, int]:
        """Both, for `since`."""
        return self.ids, self.held

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"ids": self.ids, "held": self.held}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a checkpoint."""
        self.ids, self.held = state["ids"], state["held"]
