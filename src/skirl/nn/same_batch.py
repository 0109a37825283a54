"""Checks that a forward gets the ids of the batch in the loop, and says what is wrong if it does not."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from skirl.core.batch import Sparse, moved
from skirl.core.id_hash import Hashes, hashes_of, hashes_on_device
from skirl.core.ids import Ids, capture, check_form
from skirl.core.inverse import is_shared

_HERE = "forward takes the batch that the lookahead yielded last"
_BEHIND = (
    f"{_HERE}, and got the one before it: anything that reads a batch ahead (Lightning, a double-buffered loop) must wrap "
    "the loader, inside the lookahead, not the lookahead itself, which already fetches rows ahead"
)
_AHEAD = f"{_HERE}, and got one that comes later: take batches only from the lookahead, not from the loader as well"
_CHANGED = _HERE + (
    ", and got other ids of feature {name!r}: rows were brought for the ids that it yielded. Change ids before the "
    "lookahead reads them: in the Dataset, in collate_fn, or in lookahead(sparse=...). To leave ids out in the loop, pass "
    "weights that are 0 for them"
)


class SameBatch:
    """Checks that forwards of one collection get the batch in the loop. Ids on a GPU are compared there without
    waiting, so a mismatch is raised in a later step."""

    def __init__(self, features: Sequence[str]) -> None:
        self._features = frozenset(features)
        self._before: Hashes | None = None
        self._pending: list[tuple[Tensor, Any, str]] = []
        """Comparisons running on a GPU: whether ids differ, the event after it, and the text of the error."""

    def leave(self, ids: Ids) -> None:
        self._before = ids.hashes

    def check(self, sparse: Sparse, ids: Ids, coming: Callable[[], Iterable[Ids]]) -> bool:
        """Raise if ids are not those of the current batch. Return whether the weights are."""
        check_form(sparse)
        weights = sparse.weights_or_none()
        if weights is None and ids.weights is not None:
            raise ValueError(
                "forward got no weights, the current batch has some: pass the batch that was yielded, unchanged; a "
                "collection swapped for one of TorchRec's that is not weighted takes skirl.lookahead(sparse=SWAPPED.sparse)"
            )
        if sparse.values().device.type == "cpu" or weights is not None or ids.inverse is not None or is_shared(sparse):
            return self._compare(capture(sparse, (), copy=False), ids, coming)
        self._compare_there(sparse, ids)
        return True

    def _compare(self, now: Ids, ids: Ids, coming: Callable[[], Iterable[Ids]]) -> bool:
        found = hashes_of(now)
        if found == ids.hashes:
            return True
        given = {name: hashes for name, hashes in found.items() if name in self._features}
        known = ids.hashes
        wrong = _other_ids(given, known)
        if wrong is None:
            return all(known[name][1] == weights for name, (_, weights) in given.items())
        if self._before is not None and _other_ids(given, self._before) is None:
            raise ValueError(_BEHIND)
        if any(_other_ids(given, later.hashes) is None for later in coming()):
            raise ValueError(_AHEAD)
        if now.samples != ids.samples:
            samples = "1 sample" if ids.samples == 1 else f"{ids.samples} samples"
            raise ValueError(
                f"{_HERE}, whole: it has {samples}, and forward got {now.samples}: pass that batch unchanged"
            )
        raise ValueError(_CHANGED.format(name=wrong))

    def _compare_there(self, sparse: Sparse, ids: Ids) -> None:
        self.settle()
        there, keys = sparse.values().device, list(sparse.keys())
        mine = [i for i, name in enumerate(keys) if name in self._features]
        if not mine:
            return  # looking up a missing feature raises its own error
        found = hashes_on_device(sparse.values(), sparse.offsets(), len(keys))
        hashes = ids.hashes
        known, place = torch.tensor([[hashes[keys[i]][0] for i in mine], mine], dtype=torch.int64)
        differs = (found[moved(place, there)] != moved(known, there)).any()
        after = None
        if there.type == "cuda":
            differs = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(differs, non_blocking=True)
            after = torch.cuda.Event()
            after.record()
        self._pending.append((differs, after, _CHANGED.format(name=keys[mine[0]])))

    def settle(self, *, wait: bool = False) -> None:
        """Raise if a comparison on a GPU found other ids; wait: also wait for comparisons still running."""
        while self._pending:
            differs, after, text = self._pending[0]
            if after is not None and not wait and not after.query():
                return
            if after is not None:
                after.synchronize()
            del self._pending[0]
            if bool(differs):
                self._pending.clear()
                raise ValueError(f"{text}. A step before this one has trained wrong rows: resume from a checkpoint")


def _other_ids(given: Hashes, known: Hashes) -> str | None:
    return next((name for name, (ids, _) in given.items() if name not in known or known[name][0] != ids), None)
