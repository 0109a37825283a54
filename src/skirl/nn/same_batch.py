"""Checks that a forward gets the ids of the batch in the loop, and says what is wrong if it does not."""

from collections.abc import Sequence
from typing import Any

import torch

from skirl.core.batch import KeyedJagged, Sparse
from skirl.core.id_hash import Hashes, hashes_of
from skirl.core.ids import Ids, capture, check_form
from skirl.core.inverse import given_inverse

_OTHERS = (
    "forward takes the batch that the lookahead yielded last, unchanged, and got other ids of feature {name!r}, whose rows "
    "are not there. Take batches only from the lookahead, and let what reads ahead (Lightning, a double-buffered loop) wrap "
    "the loader; change ids before: in the Dataset, in collate_fn or in lookahead(sparse=...); leave ids out by weights of "
    "0; of a wrapped module that is called several times, name the calls: skirl.wrap(features={{{name!r}: [...]}})"
)


class SameBatch:
    """Checks that forwards of one collection get the batch in the loop. Ids on a GPU are copied and
    compared without waiting, so a mismatch is raised in a later step."""

    def __init__(self, features: Sequence[str]) -> None:
        self._features = frozenset(features)
        self._pending: list[tuple[KeyedJagged, Hashes, Any]] = []
        """What forwards got on a GPU, on its way to the host, with the batch's hashes and the event after the copies."""

    def check(self, sparse: Sparse, ids: Ids) -> bool:
        """Raise if ids are not those of the current batch. Return whether the weights are."""
        check_form(sparse)
        weights = sparse.weights_or_none()
        if weights is None and ids.weights is not None:
            raise ValueError(
                "forward got no weights, the current batch has some: pass the batch that was yielded, unchanged; of a "
                "wrapped model, skirl.lookahead(sparse=lambda batch: wrapped.sparse(...))"
            )
        shared = ids.shares or given_inverse(sparse) is not None
        if sparse.values().device.type == "cpu" or weights is not None or shared:
            return self._compare(capture(sparse, (), copy=False), ids.hashes)
        self._compare_later(sparse, ids)
        return True

    def _compare(self, now: Ids, known: Hashes) -> bool:
        found = hashes_of(now)
        if found == known:
            return True
        given = {name: hashes for name, hashes in found.items() if name in self._features}
        wrong = next((name for name in given if name not in known or known[name][0] != given[name][0]), None)
        if wrong is not None:
            raise ValueError(_OTHERS.format(name=wrong))
        return all(known[name][1] == weights for name, (_, weights) in given.items())

    def _compare_later(self, sparse: Sparse, ids: Ids) -> None:
        self.settle()
        if self._features.isdisjoint(sparse.keys()):
            return  # looking up a missing feature raises its own error
        values, offsets = (
            torch.empty_like(of, device="cpu", pin_memory=of.is_cuda).copy_(of, non_blocking=True)
            for of in (sparse.values(), sparse.offsets())
        )
        after = None
        if sparse.values().is_cuda:
            after = torch.cuda.Event()
            after.record()
        self._pending.append((KeyedJagged(sparse.keys(), values, offsets=offsets), ids.hashes, after))

    def settle(self, *, wait: bool = False) -> None:
        """Raise if a forward got other ids on a GPU; wait: also wait for copies still on their way."""
        while self._pending:
            here, known, after = self._pending[0]
            if after is not None and not wait and not after.query():
                return
            if after is not None:
                after.synchronize()
            del self._pending[0]
            try:
                self._compare(capture(here, (), copy=False), known)
            except ValueError as error:
                self._pending.clear()
                wrong = f"{error}. A step before this one has trained wrong rows: resume from a checkpoint"
                raise ValueError(wrong) from None
