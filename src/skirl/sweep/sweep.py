"""Several variants of a model on one stream: read once, planned once, and each trained to the bits of its lone run."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor

from skirl.core.groups import RowOptimizers
from skirl.core.tables import Table
from skirl.engine.capacity import CacheSize
from skirl.engine.engine import Engine
from skirl.engine.work import Work
from skirl.nn.collection import Collection
from skirl.nn.same_batch import Known
from skirl.pipeline.lookahead import Lookahead
from skirl.store import Store
from skirl.sweep.checkpoint import Parts, SweepSaving, load_all, optimizers_of, read_header, save_all
from skirl.sweep.contender import Bags, Contender, Rows
from skirl.sweep.dense import LANES, LOOP, Choice, Lanes, alike_in_threads
from skirl.sweep.diverged import Diverged
from skirl.sweep.fleet import Fleet, shared_banks
from skirl.sweep.models import check_apart, made_of
from skirl.sweep.overrides import check_variants, of_variant, optimizer_of, store_of, tables_of
from skirl.sweep.variants import Variant
from skirl.tools.interrupts import uninterrupted
from skirl.tools.machine import cores

log = logging.getLogger("skirl")

Loss = Callable[[Any, Any], "Tensor | tuple[Tensor, Any]"]


def _loss_of(model: Any, batch: Any) -> Tensor:
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
    ...     [variant.loss > 0 for variant in sweep], sweep.plans
    ([False, False], 10)

    **Arguments**

    - `make_model`: gives a variant's model over `variant.embeddings`, or the model and its optimizer of torch. By default
      that is `torch.optim.Adam`. `variant.overrides` has what the variant has otherwise.
    - `variants`: at least one, each of another name.
    - `tables`: as for `EmbeddingBagCollection`.
    - `cache`: what the caches of all variants take together, such as "4GiB"; or rows of each.
    - `store`: where all other rows are: "memory", which needs no folder, or "disk:FOLDER", in which each variant has a
      folder of its name. Or a function that gives the store of a variant, by its name.
    - `optimizer`: trains the rows of variants that have no other. None is `RowwiseAdagrad()`: its state is one number a
      row, and every variant holds its own.
    - `seed`: for variants that have no other: seeds the rows' initial values and the random generator. It is fixed, so
      that a sweep repeats, and one for all, so that variants differ only in their overrides.
    - `loss`: gives a variant's loss of a batch, `loss(model, batch)`, for `sweep.step`; or the loss and what to keep as
      `variant.kept`. By default `model.loss(batch)`.
    - `pooled`: whether ids of a feature are pooled; False: embeddings are as an `EmbeddingCollection`.
    - `dtype`, `device`, `resume`: as for `EmbeddingBagCollection`.
    - `form`: how `sweep.step` trains the variants: "loop", one after the other; "lanes", each in a thread, on a CPU; "auto",
      the faster of both, timed at the start and again when a variant leaves. No bit depends on it.
    - `threads`: torch threads that each variant computes with, inside the with-block. Bits depend on it, so it is not
      what the machine has; with more than 1 there are no lanes.
    """

    def __init__(
        self,
        make_model: Callable[[Contender], Any],
        variants: Sequence[Variant],
        tables: Sequence[Table],
        *,
        cache: CacheSize,
        store: str | Callable[[str], str | Store] = "memory",
        optimizer: RowOptimizers | None = None,
        seed: int = 0,
        loss: Loss = _loss_of,
        pooled: bool = True,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        resume: bool = False,
        form: str = "auto",
        threads: int = 1,
    ) -> None:
        variants = list(variants)
        check_variants(variants, seed)
        if threads < 1:
            raise ValueError(f"threads is {threads}: set it to 1 or more")
        self._loss, self._threads = loss, threads
        self._threads_before: int | None = None
        """Torch threads before the with-block; None: it has not begun."""
        self.choice = Choice(form)
        of_tables = [of_variant(v, lambda o=v.overrides: tables_of(o, tables)) for v in variants]
        rules = [
            of_variant(v, lambda o=v.overrides, own=own: optimizer_of(o, optimizer, own))
            for v, own in zip(variants, of_tables, strict=True)
        ]
        seeds = [int(variant.overrides.get("seed", seed)) for variant in variants]
        banks = shared_banks(of_tables, rules)
        self.variants: list[Contender] = []
        """All that have begun."""
        self.lookahead: Lookahead | None = None
        """The one over this sweep, while it is open."""
        try:
            for variant, own, rule, own_seed in zip(variants, of_tables, rules, seeds, strict=True):
                make = partial(
                    Bags if pooled else Rows, variant.name, banks, tables=own, optimizer=rule, cache=cache,
                    store=store_of(store, variant.name), seed=own_seed, dtype=dtype, device=device, resume=resume,
                )  # fmt: skip
                embeddings = of_variant(variant, make)
                self.variants.append(Contender(variant, embeddings, own_seed))
            if self.variants[0].embeddings.engine.exchange is not None:
                raise ValueError("a sweep is of one trainer: start it without skirl launch or torchrun")
            for contender in self.variants:
                with contender.drawing():
                    contender.model, contender.dense = made_of(contender, make_model)
                    contender.embeddings.current.dense.of = [contender.dense] if contender.dense is not None else []
            check_apart(self.variants)
            known = Known()
            for contender in self.variants:
                contender.embeddings.same.known = known
        except BaseException:
            for contender in self.variants:
                contender.embeddings.close()
            raise
        self._lanes = None
        on_cpu = self.variants[0].embeddings.engine.device.at.type == "cpu"
        if form != LOOP and threads == 1 and on_cpu and (cores() > 1 or form == LANES):
            self._lanes = Lanes(max(2, min(cores(), len(variants))))
        self.saving: SweepSaving | None = None
        """The checkpoint that is being written."""
        self._known = False
        """Whether each variant has trained once, alone: then it is known which draw random numbers."""
        self.ended: float | None = (
            None  # when the last step did; None: the next is not timed, with the wait for its batch
        )
        self.fleet = Fleet({c.name: c.embeddings.engine for c in self.variants}, cache)

    # The race.

    def __iter__(self) -> Iterator[Contender]:
        """The variants still in the race, each in its turn: its random numbers are its own."""
        if not self._in_loop:
            yield from self.racing
            return
        for contender in self.racing:
            if contender.left is not None:  # dropped in the turn of another
                continue
            with contender.turn():
                yield contender
            if contender.left is None and not contender.stepped:
                raise RuntimeError(
                    f"the loop went on without variant {contender.name!r}: in its turn call loss.backward() and "
                    "variant.step(loss), or sweep.drop(variant.name)"
                )
            self._leave_if_diverged(contender)

    def __len__(self) -> int:
        """How many are still in the race."""
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

    def step(self, batch: Any, *, seen: Callable[[], None] | None = None) -> dict[str, float]:
        """Train every variant still in the race on the batch in the loop. Return the loss of each, by name.

        **Arguments**

        - `batch`: the one that the lookahead has yielded.
        - `seen`: is called once every variant has its `loss`, before the last one trains where they train one by one.
        """
        if not self._in_loop:
            raise RuntimeError(
                "no batch is in the loop: call sweep.step(batch) inside a loop over `skirl.lookahead(loader, sweep)`, which "
                "brings the rows of all variants"
            )
        racing = self.racing
        form = self.form if self._known else LOOP
        beside = [c for c in racing if c.beside] if form == LANES and alike_in_threads() else []
        if beside:
            self._in_lanes(beside, batch)
        for contender in racing:
            if contender not in beside:
                watched = self._lanes is not None and contender.beside and not self.choice.held
                with contender.watched_turn() if watched else contender.turn():
                    self._train(contender, batch, seen if contender is racing[-1] else None)
        if seen is not None and racing[-1] in beside:
            seen()
        now = time.perf_counter()
        if self._known and self.ended is not None:
            self.choice.took(form, now - self.ended)
        self._known, self.ended = not self.choice.held, now
        for contender in racing:
            self._leave_if_diverged(contender)
        return {contender.name: cast(float, contender.loss) for contender in racing}

    def _in_lanes(self, contenders: Sequence[Contender], batch: Any) -> None:
        """Train these beside each other. All threads of a process draw from one generator, so none of them may."""

        def train(contender: Contender) -> None:
            with contender.turn_beside():
                self._train(contender, batch)

        assert self._lanes is not None
        before = torch.get_rng_state()
        self._lanes.run({c.name: partial(train, c) for c in contenders})
        if not torch.equal(before, torch.get_rng_state()):
            self.fleet.lose(
                "a model drew random numbers in other ways than by nn.Dropout, which it did not do in its first step, and "
                "in lanes it is not known whose they are: set form='loop'"
            )
            self.fleet.check()

    def _train(self, contender: Contender, batch: Any, seen: Callable[[], None] | None = None) -> None:
        found = self._loss(contender.model, batch)
        loss, contender.kept = found if isinstance(found, tuple) else (found, None)
        if seen is not None:
            contender.loss = float(loss.detach())
            seen()
        loss.backward()
        contender.step(loss)

    def drop(self, name: str, why: str = "dropped") -> None:
        """A variant leaves: its rows go to its store, cache and model are let go. The others go on with their bits.

        **Arguments**

        - `name`: a variant still in the race.
        - `why`: what it is said to have left for.
        """
        contender = self[name]
        if contender.left is not None:
            raise ValueError(f"variant {name!r} has left the sweep before ({contender.left})")
        if len(self.racing) == 1:
            raise ValueError(f"variant {name!r} is the last of the sweep: leave the loop to end it")
        self._leave(contender, why)

    def _leave(self, contender: Contender, why: str) -> None:
        embeddings = contender.embeddings
        if self.saving is not None:
            self.saving.ended()
        with uninterrupted():
            if self.lookahead is not None:
                self.lookahead.drain()
            embeddings.current.finish()
            self.fleet.leave(contender.name)
            contender.leave(why)
            self.choice.anew()
            embeddings.opened_by_sweep(None)
            embeddings.close()
            embeddings.engine.release()

    def _leave_if_diverged(self, contender: Contender) -> None:
        if not contender.diverged or contender.left is not None:
            return
        step = 0 if self.lookahead is None else self.lookahead.step
        if len(self.racing) == 1:
            raise Diverged.all_of(len(self.variants), contender.name, step, contender.loss)
        log.warning("variant %r has diverged: its loss is %s in step %d", contender.name, contender.loss, step)
        self._leave(contender, f"diverged in step {step}")

    def save(
        self,
        path: str | Path,
        *,
        parts: Parts = optimizers_of,
        also: Mapping[str, Any] | None = None,
        wait: bool = True,
    ) -> SweepSaving:
        """Save all variants in the race after the batch in the loop, each as `skirl.save` does in a folder of its name.

        **Arguments**

        - `path`: the folder. Until all variants are on disk, the checkpoint before counts for all of them.
        - `parts`: gives what is saved of a variant beside its model, as the `optimizers` of `skirl.save`; its optimizer by
          default.
        - `also`: facts that `load` gives back; what JSON can hold. None is no facts.
        - `wait`: return only when it is on disk. False returns once training may go on; what it returns has `wait`, and the
          next save waits for it, as does a variant that leaves.
        """
        if (now := next((c.name for c in self.racing if c.embeddings.in_turn), None)) is not None:
            raise RuntimeError(
                f"sweep.save is called in the turn of variant {now!r}, whose random numbers are out then: call it after the "
                "loop over the variants"
            )
        self.settle()
        self.saving = saving = save_all(Path(path), self.variants, self.lookahead, parts, also or {})
        return saving.wait() if wait else saving

    def settle(self) -> None:
        """Return when the checkpoint that is being written is on disk; if it cannot be, its error is raised, once."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.wait()

    def load(self, path: str | Path, *, parts: Parts = optimizers_of) -> dict[str, Any]:
        """Go on from a checkpoint, before the loop: make the same sweep and its lookahead, then load. What `also` was.

        Variants that had left leave again.

        **Arguments**

        - `path`: the folder that `save` was given.
        - `parts`: as `save` was given.
        """
        header = read_header(Path(path), [contender.name for contender in self.variants])
        for name, why in header["left"].items():
            if self[name].left is None:
                self._leave(self[name], why)
        load_all(Path(path), header, self.racing, self.lookahead, parts)
        self.fleet.know_rows()
        return header["also"]

    # What was shared.

    @property
    def form(self) -> str:
        """How `step` trains the variants: "loop" or "lanes"."""
        alone = self._lanes is None or len(self.racing) == 1
        return LOOP if alone else self.choice.next()

    @property
    def plans(self) -> int:
        """Steps that were planned and brought, once for all variants."""
        return self.fleet.plans

    @property
    def read_batches(self) -> int:
        """Batches whose ids were checked and hashed, once for all variants."""
        return self.fleet.resolver.batches

    # For its lookahead, in the place of a collection.

    def in_their_place(self) -> Collection:
        """What stands for the embeddings of all variants."""
        return cast(Collection, self)

    @property
    def engine(self) -> Engine:
        """What stands for the engines of all variants."""
        return cast(Engine, self.fleet)

    @property
    def current(self) -> "Sweep":
        """What stands for the steps of all variants."""
        return self

    @property
    def training(self) -> bool:
        """Whether no model is in eval mode."""
        return all(contender.embeddings.training for contender in self.racing)

    def opened(self, loop: Any) -> None:
        """Called by a lookahead when it begins and when it ends.

        **Arguments**

        - `loop`: the lookahead; None when it ends.
        """
        if loop is not None and self._threads_before is None:
            raise RuntimeError(
                "the sweep is not open: write `with skirl.Sweep(...) as sweep:` around the lookahead: it sets "
                "the threads that bits depend on"
            )
        if loop is not None and self.lookahead is not None:
            raise RuntimeError("another lookahead over this sweep is open: leave its with-block first")
        self.lookahead, self.ended = loop, None
        for contender in self.racing:
            contender.embeddings.opened_by_sweep(loop)

    def expect(self, work: Work, micro: int) -> None:
        """A batch comes into the loop.

        **Arguments**

        - `work`: what the plan says of its step.
        - `micro`: its number among the micro-batches of the step.
        """
        self._check_round()
        ends = self.lookahead is None or self.lookahead.ends_step
        for contender in self.racing:
            contender.expect(work.packs[contender.name], micro, ends)

    def finish(self, apply: bool = True) -> None:
        """The step in the loop is over.

        **Arguments**

        - `apply`: whether it is applied; otherwise it never happened.
        """
        if apply:
            self._check_round()
        for contender in self.racing:
            contender.embeddings.current.finish(apply)
            contender.stepped = False

    def _check_round(self) -> None:
        """Refuse a batch that some were trained on, and others were not, or not to the end."""
        trained = [contender for contender in self.racing if contender.stepped]
        half = [c.name for c in self.racing if not c.stepped and c.embeddings.current.returned_now]
        if half:
            raise RuntimeError(
                f"the loop left a batch on which variant {half[0]!r} had its backward and no step: its rows are updated, so "
                "call variant.step(loss) after each loss.backward()"
            )
        if trained and len(trained) < len(self.racing):
            skipped = next(contender.name for contender in self.racing if not contender.stepped)
            raise RuntimeError(
                f"the loop left a batch that variant {skipped!r} was not trained on, and {trained[0].name!r} was: train "
                "each variant on each batch, `for variant in sweep`, or leave one out with sweep.drop(NAME)"
            )

    @property
    def _in_loop(self) -> bool:
        """Whether a batch is in the loop."""
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
        """Write all rows to their stores and let those go."""
        if self._lanes is not None:
            self._lanes.close()
        with ExitStack() as closing:  # each, whatever happens to another
            for contender in reversed(self.variants):
                closing.callback(contender.embeddings.close)
            closing.callback(self.settle)
