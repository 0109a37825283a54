"""Several variants of a model on one stream: read once, planned once, and each trained to the bits of its lone run."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor

from skirl.checkpoint import folder
from skirl.checkpoint.load_run import load
from skirl.checkpoint.saving import Saving, save
from skirl.core.groups import RowOptimizers
from skirl.core.tables import Table
from skirl.engine.capacity import CacheSize
from skirl.engine.device import torch_device
from skirl.engine.engine import Engine, Opening
from skirl.engine.work import Work
from skirl.nn.collection import Collection
from skirl.peers.base import Alone
from skirl.pipeline.lookahead import Lookahead
from skirl.sweep.checkpoint import read_header, write_header, write_rows
from skirl.sweep.contender import (
    Contender,
    Folders,
    Loss,
    VariantBags,
    VariantRows,
    check_apart,
    packs_of,
)
from skirl.sweep.fused import Forms
from skirl.sweep.ranks import Ranks
from skirl.sweep.variants import Variant
from skirl.tools.interrupts import Hold


class Diverged(ArithmeticError):
    """No variant of a sweep is left, because the losses of all became infinite or nan."""


log = logging.getLogger("skirl")


def _loss_of(model: Any, batch: Any) -> Tensor:
    if not hasattr(model, "loss"):
        raise TypeError(f"{type(model).__name__} has no method loss(batch): add one, or pass loss= to skirl.Sweep")
    return model.loss(batch)


class Sweep:
    """Variants of a model that train on the same batches, each with rows, weights and random numbers of its own.

    A variant's bits are those of its lone run: of the same model over embeddings of its own, made after
    `torch.manual_seed(seed)`, with as many torch threads, whatever the other variants are.

    >>> import skirl, torch
    >>> class Sum(torch.nn.Module):
    ...     def __init__(self, embeddings):
    ...         super().__init__()
    ...         self.embeddings = embeddings
    ...     def loss(self, ids):
    ...         return self.embeddings(ids)["item"].sum()
    >>> variants = [skirl.Variant("slow", {"lr": 0.1}), skirl.Variant("fast", {"lr": 0.2})]
    >>> loader = [skirl.KeyedJagged.one_hot(["item"], torch.tensor([[i % 5]])) for i in range(10)]
    >>> with (
    ...     skirl.Sweep(lambda v: Sum(v.embeddings), variants, [skirl.Table("item", 10, 2)], cache="1KiB") as sweep,
    ...     skirl.lookahead(loader, sweep, sparse=lambda ids: ids) as batches,
    ... ):
    ...     for ids in batches:
    ...         for variant in sweep:
    ...             loss = variant.model.loss(ids)
    ...             loss.backward()
    ...             variant.step(loss)
    ...     [variant.loss > 0 for variant in sweep]
    [False, False]

    Iterating yields each variant still in the race in its turn: its `model`, `step(loss)`, the last `loss`, what the loss
    function `kept`, whether its steps were `exact`, and the `parts` saved besides its model: its optimizer, and what you
    append, such as a schedule. Of one that left, `left` says why.

    **Arguments**

    - `make_model`: returns a variant's model over `variant.embeddings`, or the model and its torch optimizer, which is
      `torch.optim.Adam` by default. `variant.overrides` has the values in which the variant differs.
    - `variants`: at least one; no two have the same name.
    - `tables`: as for `EmbeddingBagCollection`.
    - `cache`: the memory of all variants' caches together, such as "4GiB", or the rows of each cache.
    - `store`: where all other rows are: "memory", which needs no folder, or "disk:FOLDER". A record there has the rows of
      all variants, one after the other.
    - `optimizer`: trains the rows of variants that set no other. None means `RowwiseAdagrad()`: every variant holds a state
      of its own, and this one is the smallest, one number a row.
    - `seed`: seed of the initial rows and of the random generator, for variants that set no other: 0, fixed so that a
      sweep can be repeated, and the same for all, so that variants differ only in their overrides.
    - `loss`: called as `loss(model, batch)` by `sweep.step`, which may make a graph of it: it is to depend on the model's
      weights and the batch alone. It returns a variant's loss, or the loss and what to keep as
      `variant.kept`. By default `model.loss(batch)`, which all models of skirl have.
    - `pooled`: pool the ids of a feature, as most models do; with False, variants have an `EmbeddingCollection`.
    - `dtype`, `device`, `resume`: as for `EmbeddingBagCollection`.
    - `threads`: torch threads that each variant computes with inside the with-block. Bits depend on it, so its default does
      not depend on the machine.
    - `inexact`: let `step` compute variants of one architecture as one even where their bits would not be those of lone
      runs, if that is faster. By default only where a probe finds them equal; `variant.exact` says what was done.
    - `memory`: the most that weights, their states and a step of all variants may take, such as "8GiB", or "auto": what is
      free. `step` then recomputes, moves to the host or takes variants in turn what does not fit. None: no limit.
    """

    def __init__(
        self,
        make_model: Callable[[Contender], Any],
        variants: Sequence[Variant],
        tables: Sequence[Table],
        *,
        cache: CacheSize,
        store: str | Opening = "memory",
        optimizer: RowOptimizers | None = None,
        seed: int = 0,
        loss: Loss = _loss_of,
        pooled: bool = True,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        resume: bool = False,
        threads: int = 1,
        inexact: bool = False,
        memory: str | None = None,
    ) -> None:
        if isinstance(variants, Mapping) or not all(isinstance(each, Variant) for each in variants):
            raise TypeError('variants is to be a list of skirl.Variant, such as skirl.Variant("slow", {"lr": 0.01})')
        variants = list(variants)
        packs = packs_of(variants, tables, optimizer, seed)
        if threads < 1:
            raise ValueError(f"threads is {threads}: set it to 1 or more")
        self.forms = Forms(loss, inexact, memory, torch_device(device))
        self._threads = threads
        self._threads_before: int | None = None
        """Torch threads before the with-block; None if it has not begun."""
        self.lookahead: Lookahead | None = None
        opening = Folders(store, resume=resume) if isinstance(store, str) else store
        self.engine = Engine(
            packs, cache=cache, store=opening, dtype=dtype, resume=resume, pooled=pooled, device=device
        )
        """The rows of all variants."""
        try:
            if not self.engine.rows.local:
                raise ValueError("a sweep is of one trainer: start it without skirl launch or torchrun")
            kind = VariantBags if pooled else VariantRows
            self.variants = [
                Contender(variant, kind(self.engine, pack), pack.seed)
                for variant, pack in zip(variants, packs, strict=True)
            ]
            for contender in self.variants:
                contender.make(make_model)
            check_apart(self.variants)
        except BaseException:
            self.engine.store.close()
            raise
        self.rows_saved: dict[str, Any] = {}
        """What the last checkpoint has of the rows, for the next one to build on."""

    # The race.

    def __iter__(self) -> Iterator[Contender]:
        """Yield the variants still in the race, each with torch's random generator set to its own."""
        if not self._in_loop:
            yield from self.racing
            return
        for contender in self.racing:
            if contender.left is not None:  # dropped in the turn of another
                continue
            with contender.turn():
                yield contender
            self._leave_if_diverged(contender)

    def __len__(self) -> int:
        """Return how many variants are still in the race."""
        return len(self.racing)

    def __getitem__(self, name: str) -> Contender:
        for contender in self.variants:
            if contender.name == name:
                return contender
        raise KeyError(f"no variant {name!r}: there are {', '.join(repr(c.name) for c in self.variants)}")

    @property
    def racing(self) -> list[Contender]:
        """The variants still in the race."""
        return [contender for contender in self.variants if contender.left is None]

    def step(self, batch: Any) -> dict[str, float]:
        """Train every variant still in the race on the batch in the loop. Return the loss of each, by name.

        **Arguments**

        - `batch`: the batch that the lookahead has yielded.
        """
        if not self._in_loop:
            raise RuntimeError(
                "no batch is in the loop: call sweep.step(batch) inside a loop over `skirl.lookahead(loader, sweep)`, which "
                "brings the rows of all variants"
            )
        racing = self.racing
        self.forms.step(racing, batch)
        for contender in racing:
            self._leave_if_diverged(contender)
        return {contender.name: cast(float, contender.loss) for contender in racing}

    def drop(self, name: str, why: str = "dropped") -> None:
        """Remove a variant, and free its model at once and its rows after the steps that are planned. The others keep
        their bits.

        **Arguments**

        - `name`: a variant still in the race.
        - `why`: the reason, as it will be reported; "dropped" if you have no other.
        """
        contender = self[name]
        if contender.left is not None:
            raise ValueError(f"variant {name!r} has left the sweep before ({contender.left})")
        if len(self.racing) == 1:
            raise ValueError(f"variant {name!r} is the last of the sweep: leave the loop to end it")
        self._leave(contender, why)

    def _leave(self, contender: Contender, why: str, step: int | None = None) -> None:
        embeddings = contender.embeddings
        with Hold():
            if self.lookahead is not None:
                self.lookahead.drain()
            embeddings.current.finish()
            self.forms.leave(contender)
            contender.leave(why, self._now if step is None else step)
            embeddings.current.opened(None)
            embeddings.pack.left = True
            if self.lookahead is not None:
                self.lookahead.renew()
            else:
                self.engine.drop_caches()

    def _leave_if_diverged(self, contender: Contender) -> None:
        if not contender.diverged or contender.left is not None:
            return
        step = self._now
        if len(self.racing) == 1:
            raise Diverged(
                f"all variants have diverged, the last one ({contender.name!r}) in step {step}, where "
                f"its loss is {contender.loss}: try smaller learning rates"
            )
        log.warning("variant %r has diverged: its loss is %s in step %d", contender.name, contender.loss, step)
        self._leave(contender, f"diverged in step {step}")

    def save(self, path: str | Path) -> None:
        """Save all variants in the race after the batch in the loop, each as `skirl.save` does in a folder of its name.

        **Arguments**

        - `path`: the folder. Until all variants are on disk, the previous checkpoint counts for all of them.
        """
        if (now := next((c.name for c in self.racing if c.embeddings.in_turn), None)) is not None:
            raise RuntimeError(
                f"sweep.save is called in the turn of variant {now!r}, whose random numbers are out then: call it after the "
                "loop over the variants"
            )
        left = {one.name: (one.left, one.left_at) for one in self.variants if one.left is not None}
        self.save_on(Ranks(Alone()), Path(path), self.racing, step=self._now, left=left)

    def save_on(self, ranks: Ranks, path: Path, some: Sequence[Contender], **header: Any) -> None:
        """Save some variants of each rank. The header, which the first rank writes, makes them count."""
        savings = dict[str, Saving]()

        def write() -> dict[str, str]:
            savings.update(self.saved(path, some))
            return {name: saving.path.name for name, saving in savings.items()}

        names = ranks.written(write, "a checkpoint is on disk")
        header["variants"] = {name: of for one in names for name, of in one.items()}
        ranks.written(lambda: write_header(path, **header) if ranks.first else None, "its header")
        for saving in savings.values():  # what the header, which is on disk, no longer names
            folder.retain(saving.folder, saving.number, 1, saving.number, saving.start)

    def saved(self, path: Path, some: Sequence[Contender]) -> dict[str, Saving]:
        """Save some of the variants in the race.

        The header names them later, if at all: until then, the checkpoints that it names stay.
        """
        if not some:
            return {}
        self._check_round()
        racing, savings = self.racing, dict[str, Saving]()
        with Hold():
            racing[0].embeddings.current.settle()
            rows_of = write_rows(self.engine, path / racing[0].name, self.rows_saved)
            for one in some:
                one.embeddings.frozen_rows = rows_of(one.embeddings.pack)
                with one.turn():
                    own = {"model": one.model, "optimizers": one.parts, "data": self.lookahead}
                    savings[one.name] = save(path / one.name, **own)
        return savings

    def load(self, path: str | Path) -> None:
        """Resume from a checkpoint. Make the same sweep and lookahead first. Variants that had left leave again.

        **Arguments**

        - `path`: the folder given to `save`.
        """
        header = read_header(Path(path), [contender.name for contender in self.variants])
        for name, (why, step) in header["left"].items():
            if self[name].left is None:
                self._leave(self[name], why, step)
        self.load_from(Path(path), header)

    def load_from(self, path: Path, header: Mapping[str, Any]) -> None:
        self.engine.empty()
        try:
            for one in self.racing:
                with one.turn():
                    own = {"model": one.model, "optimizers": one.parts, "data": self.lookahead}
                    load(path / one.name / header["variants"][one.name], **own)
        except BaseException as error:
            self.engine.lose(f"{path} was loaded only in part: {error}", error)
            raise
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(header["generator"]), dtype=torch.uint8))

    # For its lookahead, in the place of a collection.

    def in_their_place(self) -> Collection:
        """The collection that takes the place of all variants' embeddings."""
        return cast(Collection, self)

    @property
    def current(self) -> "Sweep":
        return self

    @property
    def training(self) -> bool:
        return all(contender.embeddings.training for contender in self.racing)

    def opened(self, loop: Any) -> None:
        """Take note that a lookahead begins; with None, that it ends."""
        if loop is not None and self._threads_before is None:
            raise RuntimeError(
                "the sweep is not open: write `with skirl.Sweep(...) as sweep:` around the lookahead: it sets "
                "the threads that bits depend on"
            )
        for contender in self.racing:
            contender.embeddings.current.opened(loop)
        self.lookahead = loop

    def expect(self, work: Work, micro: int) -> None:
        """Take note that a batch enters the loop, one of the micro-batches of a step."""
        self._check_round()
        ends = self.lookahead is None or self.lookahead.ends_step
        for contender in self.racing:
            contender.embeddings.current.expect(work.packs[contender.name], micro)
            contender.stepped, contender.ends_step = False, ends

    def finish(self, apply: bool = True) -> None:
        """End the step in the loop, keeping its updates or not."""
        if apply:
            self._check_round()
        for contender in self.racing:
            contender.embeddings.current.finish(apply)
            contender.stepped = False

    def _check_round(self) -> None:
        begun = [c.name for c in self.racing if c.stepped or c.embeddings.current.returned_now]
        missed = [c.name for c in self.racing if not c.stepped]
        if begun and missed:
            raise RuntimeError(
                f"the loop left a batch that {begun[0]!r} was trained on without a step of variant {missed[0]!r}: call "
                "loss.backward() and variant.step(loss) of each, `for variant in sweep`, or leave one out with "
                "sweep.drop(NAME)"
            )

    @property
    def _now(self) -> int:
        return 0 if self.lookahead is None else self.lookahead.step

    @property
    def _in_loop(self) -> bool:
        return any(contender.embeddings.current.work is not None for contender in self.racing)

    # The with-block.

    def __enter__(self) -> "Sweep":
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
        try:
            self.close()
        except Exception as late:
            if error is None:
                raise
            error.add_note(f"and while closing the sweep: {late}")

    def close(self) -> None:
        """Write all rows to their stores and close these."""
        if self.lookahead is not None:
            raise RuntimeError("a lookahead over this sweep is open: leave its with-block first")
        if not self.engine.store.closed:
            self.engine.flush()
            self.engine.store.close()
