"""A variant in its sweep: its rows, model, optimizer and random generator, and whose turn it is."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from skirl.core.batch import Sparse
from skirl.engine.engine import Engine
from skirl.engine.work import Work
from skirl.nn.collection import Collection, EmbeddingBagCollection, EmbeddingCollection
from skirl.nn.current_step import Loop
from skirl.nn.output import Pooled
from skirl.sweep.dropout import Watched, drawn_from, dropouts
from skirl.sweep.variants import Variant


class OfVariant(Collection):
    """The embeddings of one variant: rows of its own, which move by the plan of the sweep."""

    def __init__(self, variant: str, banks: Sequence[tuple[int, ...]], **options: Any) -> None:
        self._variant, self._banks = variant, banks
        self.in_turn = False
        """Whether the variant trains now."""
        super().__init__(**options)

    def _engine_of(self, tables: Any, **options: Any) -> Engine:
        return Engine(tables, banks=self._banks, **options)

    def forward(self, sparse: Sparse) -> Pooled:
        """Look the ids of one batch up; to train, in the variant's turn alone."""
        if self.training and torch.is_grad_enabled() and not self.in_turn:
            raise RuntimeError(
                f"variant {self._variant!r} is trained outside of its turn: train it in `for variant in sweep`, inside a "
                "loop over `skirl.lookahead(loader, sweep)`, or call sweep.step(batch)"
            )
        return super().forward(sparse)

    def opened(self, loop: Loop | None) -> None:
        """A lookahead over one variant would move its rows by another plan."""
        raise RuntimeError(
            f"variant {self._variant!r} has the plan of its sweep: pass the sweep to skirl.lookahead(loader, sweep)"
        )

    def opened_by_sweep(self, loop: Loop | None) -> None:
        """The sweep's lookahead begins, or ends."""
        self.current.opened(loop)


class Bags(OfVariant, EmbeddingBagCollection):
    """Pooled embeddings of one variant."""


class Rows(OfVariant, EmbeddingCollection):
    """Embeddings of one variant, one row for each id."""


class Contender:
    """A variant in its sweep, as the loop sees it.

    **Arguments**

    - `variant`: its name and overrides.
    - `embeddings`: its rows.
    - `seed`: of its random generator, which its model's first weights are drawn from, and all that it draws later.
    """

    def __init__(self, variant: Variant, embeddings: OfVariant, seed: int) -> None:
        self.variant = variant
        self.name = variant.name
        self.overrides = variant.overrides
        self.embeddings = embeddings
        self.model: Any = embeddings
        """Its model, over its embeddings."""
        self.dense: torch.optim.Optimizer | None = None
        """The optimizer of all else that its model has; None: nothing else is trained."""
        self.loss: float | None = None
        """Of the batch that it was trained on last."""
        self.kept: Any = None
        """What the sweep's `loss` gave beside that."""
        self.left: str | None = None
        """Why it is not in the race any more; None: it is."""
        self.stepped = False
        """Whether it was trained on the batch in the loop."""
        self.ends_step = True
        """Whether that is the last micro-batch of its step."""
        self.beside = True
        """Whether it may train beside others: in its turns nothing but its Dropout modules has drawn random numbers."""
        self._generator = _seeded(seed)
        self._own = torch.Generator()

    @property
    def diverged(self) -> bool:
        """Whether its last loss is no finite number."""
        return self.loss is not None and not math.isfinite(self.loss)

    def step(self, loss: Tensor) -> None:
        """The batch's backward is back, which has updated its rows: let its optimizer make its step.

        **Arguments**

        - `loss`: the variant's loss of the batch in the loop.
        """
        if self.left is not None:
            raise RuntimeError(f"variant {self.name!r} has left the sweep ({self.left}): it is not trained any more")
        if not self.embeddings.in_turn:
            raise RuntimeError(
                f"variant {self.name!r} is stepped outside of its turn: call its step in `for variant in sweep`"
            )
        if self.stepped:
            raise RuntimeError(
                f"variant {self.name!r} is stepped twice on one batch: each variant trains once on each batch"
            )
        self.stepped = True
        self.loss = float(loss.detach())
        if self.dense is not None and self.ends_step:
            self.dense.step()
            self.dense.zero_grad()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """In this block it trains, and draws from its own random generator."""
        with self.open(), self.drawing():
            yield

    @contextmanager
    def turn_beside(self) -> Iterator[None]:
        """In this block it trains in a thread beside others: its Dropout modules draw from its own random generator."""
        modules = dropouts(self.model)
        with self.open():
            if not modules:
                yield
                return
            self._own.set_state(self._generator[0])
            try:
                with drawn_from(self._own, modules):
                    yield
            finally:
                self._generator = [self._own.get_state(), *self._generator[1:]]

    @contextmanager
    def watched_turn(self) -> Iterator[None]:
        """Its turn, which says whether it may train beside others in the next."""
        watched = Watched(dropouts(self.model))
        with self.turn(), watched.watching():
            yield
        self.beside = watched.alone

    @contextmanager
    def open(self) -> Iterator[None]:
        """In this block it trains, and draws nothing."""
        self.embeddings.in_turn = True
        try:
            yield
        finally:
            self.embeddings.in_turn = False

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """In this block torch's random generator is its own."""
        others = _state()
        _put(self._generator)
        try:
            yield
        finally:
            self._generator = _state()
            _put(others)

    def expect(self, work: Work, micro: int, ends_step: bool) -> None:
        """A batch comes into the loop."""
        self.embeddings.current.expect(work, micro)
        self.stepped, self.ends_step = False, ends_step

    def __repr__(self) -> str:
        state = f", left: {self.left}" if self.left else ""
        return f"<variant {self.name!r}{state}>"


State = list[Tensor]


def _state() -> State:
    """Of torch's generators: on the CPU, and on GPUs that are in use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def _put(state: State) -> None:
    torch.set_rng_state(state[0])
    for device, own in enumerate(state[1:]):
        torch.cuda.set_rng_state(own, device)


def _seeded(seed: int) -> State:
    """As after `torch.manual_seed(seed)`."""
    others = _state()
    try:
        torch.manual_seed(seed)
        return _state()
    finally:
        _put(others)
