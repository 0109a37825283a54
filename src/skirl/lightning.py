"""Support for Lightning: `Rows` is a callback that gives the trainer a lookahead, and adds rows to its checkpoints."""

import os
import shutil
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

try:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch import Callback
except ImportError as missing:
    raise ImportError("skirl.lightning needs Lightning: pip install lightning") from missing

from skirl.checkpoint import folder, load, save
from skirl.nn.collection import collections_of
from skirl.pipeline.lookahead import Lookahead, Pass, lookahead
from skirl.tools.sealed_json import CheckpointError

__all__ = ["Rows"]

_KEY = "skirl"
"""The entry of a Lightning checkpoint that says where its rows are."""


class Rows(Callback):
    """Trains embeddings in a Lightning trainer: a callback, whose `loader` method wraps the training loader.

    Rows are updated once per step, after the last of `accumulate_grad_batches` micro-batches. Next to each checkpoint
    that the trainer writes, `skirl.save` writes a folder, named like it plus `.rows`; `ckpt_path` loads both.

        rows = skirl.lightning.Rows()
        trainer = lightning.Trainer(callbacks=[rows], accumulate_grad_batches=2)
        trainer.fit(model, rows.loader(train), valid)

    **Arguments**

    - `accumulate`: micro-batches per step. None, the default, uses the trainer's `accumulate_grad_batches`; set it for
      a module with manual optimization.
    - `options`: further arguments of `skirl.lookahead`: `sparse`, `depth`, `prefetch` and so on.
    """

    def __init__(self, *, accumulate: int | None = None, **options: Any) -> None:
        self.options = options
        self.trainer: Any = None
        self.ahead: Lookahead | None = None
        self.passing: Pass | None = None
        self._made_with: tuple[Any, int] | None = None
        self._accumulate = accumulate
        self._place: dict[str, Any] | None = None
        """The run's position in the data, while there is no lookahead."""
        self._resumes = False
        """True if that position was loaded from a checkpoint, and no pass has begun there yet."""

    def loader(self, loader: Iterable[Any], *, length: int | None = None) -> "Batches":
        """Wrap the loader for `trainer.fit`, or for `train_dataloader` to return. Evaluation loaders stay as they are.

        **Arguments**

        - `loader`: yields batches: a DataLoader, a list, anything iterable.
        - `length`: batches per epoch, for a loader without `len()`. Without a length, Lightning would read one batch
          ahead of the one that it trains.
        """
        return Batches(self, loader, length)

    @property
    def accumulate(self) -> int:
        return self._accumulate or self.trainer.accumulate_grad_batches

    def begin(self, loader: "_First") -> Pass:
        """Begin a pass over a loader: from the start of an epoch, or from where a checkpoint was written."""
        k, resumes, self._resumes = self.accumulate, self._resumes, False
        place = self.place if resumes else {**self.place, "batches": 0, "loader": None}
        place = place if place["batches"] else {**place, "accumulate": k}
        if self._made_with != (loader, k):  # first pass, another loader, or a GradientAccumulationScheduler
            self.close()
            loader.skip = place["batches"] if place["loader"] is not None else 0
            self.ahead = lookahead(loader, self.trainer.lightning_module, accumulate=k, **self.options).__enter__()
            self.ahead.load_state_dict(place)
            self._made_with = loader, k
        assert self.ahead is not None
        self.passing = iter(self.ahead)
        done, ours = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready, self.place["batches"]
        if done != ours:
            raise ValueError(
                f"Lightning continues after batch {done} of the epoch, but the rows are those after batch {ours}: fit from "
                "the beginning, or from another checkpoint"
            )
        return self.passing

    @property
    def place(self) -> dict[str, Any]:
        """The run's position in the data: the state of a lookahead."""
        if self.ahead is not None:
            return self.ahead.state_dict()
        nowhere = {"step": 0, "epochs": 0, "batches": 0, "accumulate": self.accumulate, "loader": None, "start": None}
        return self._place or nowhere

    def data(self) -> SimpleNamespace:
        """The run's position for `skirl.save` and `skirl.load`, even if there is no lookahead (any more)."""

        def resume(place: dict[str, Any]) -> None:
            self._place, self._resumes = place, True

        return SimpleNamespace(state_dict=lambda: self.place, load_state_dict=resume)

    def close(self, apply: bool = True) -> None:
        """End the lookahead. A step with only some of its micro-batches is discarded, as for the dense parameters."""
        ahead, self.ahead, self.passing, self._made_with = self.ahead, None, None, None
        if ahead is not None:
            ahead.close(apply and ahead.ends_step)
            self._place = ahead.state_dict()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        collections_of(pl_module)
        if trainer.world_size > 1:
            raise ValueError(f"skirl trains in one process, and the trainer has {trainer.world_size}: set devices=1")
        self.trainer = trainer
        files = trainer.strategy.checkpoint_io
        trainer.strategy.checkpoint_io = WithRows(files.files if isinstance(files, WithRows) else files, self)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        for collection in collections_of(pl_module).values():
            collection.grad_scaler = collection.grad_scaler or scaler

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Keep a resumed step from being saved again after the next micro-batch."""
        if self._resumes:
            for callback in trainer.checkpoint_callbacks:
                if hasattr(callback, "_last_global_step_saved"):
                    callback._last_global_step_saved = trainer.global_step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.passing is None:
            raise ValueError(
                "the trainer has a loader that skirl does not know: call trainer.fit(model, rows.loader(loader))"
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the pass after the last batch, since Lightning never asks for one more."""
        if self.passing is None or not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            return
        more = next(self.passing, None)
        assert more is None, "Lightning counts the batches of an epoch as `Batches` does"

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End an epoch that `max_steps` or `should_stop` cut short, as Lightning does."""
        if self.place["batches"]:
            self.close()
            self._place = {**self.place, "batches": 0, "loader": None}

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.close(apply=False)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.close()


class Batches:
    """The loader that `Rows.loader` makes, from which Lightning takes a length and the batches of each epoch."""

    def __init__(self, rows: Rows, loader: Iterable[Any], length: int | None) -> None:
        self.rows = rows
        self._first = _First(loader)
        self._length = length

    def __getattr__(self, name: str) -> Any:
        if name in ("sampler", "batch_sampler"):  # Lightning tells them the epoch
            return getattr(self._first.loader, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __len__(self) -> int:
        return self._length if self._length is not None else len(self._first.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over an epoch. It begins at the first `next`, since Lightning makes iterators that it never uses."""
        trainer = self.rows.trainer
        if trainer is None:
            raise ValueError(
                "the loader belongs to a skirl.lightning.Rows that is not among the trainer's callbacks: add it"
            )
        self._first.limit = self._count(trainer.limit_train_batches)
        return self._batches()

    def state_dict(self) -> dict[str, Any]:  # Lightning asks for it; the position is saved with the rows
        return {"batches": self.rows.place["batches"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def _batches(self) -> Iterator[Any]:
        passing = self.rows.begin(self._first)
        count, limit = self.rows.place["batches"], self._first.limit
        for batch in passing:
            count += 1
            yield batch
        if count < limit:
            raise ValueError(
                f"the loader ended after {count} batches, and the epoch should have {limit}: set length in rows.loader, or "
                f"limit_train_batches, to {count}"
            )

    def _count(self, limit: int | float) -> int:
        try:
            length = len(self)
        except TypeError:
            if isinstance(limit, float):
                raise ValueError(
                    "the loader has no length, and so Lightning would take each batch before it has trained on the one "
                    "before: say how many batches an epoch has, rows.loader(loader, length=...)"
                ) from None
            return limit
        return min(length, limit) if isinstance(limit, int) else int(length * limit)


class _First:
    """The first `limit` batches of a loader, with all its other attributes."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.limit = 0
        self.skip = 0  # batches that the loader itself skips in the next pass

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        return islice(iter(self.loader), self.limit - skip)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class WithRows(CheckpointIO):
    """Lightning's checkpoints, with a folder of rows next to each. It keeps two checkpoints of rows, and Lightning's file
    names the one that it belongs to. So a kill between writing the two leaves a complete checkpoint under the name."""

    def __init__(self, files: CheckpointIO, rows: Rows) -> None:
        self.files = files
        self.rows = rows

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if "://" in str(path):
            raise CheckpointError(f"{path} is not on a file system: rows are saved to folders, set dirpath to one")
        model, where = self.rows.trainer.lightning_module, _beside(path)
        saving = save(where, model=model, data=self.rows.data(), keep_last=2)
        for name in checkpoint["state_dict"].keys() & (now := model.state_dict()).keys():
            if name.endswith("_extra_state"):
                checkpoint["state_dict"][name] = now[name]  # saving began a new generation of rows
        checkpoint[_KEY] = {"rows": where.name, "number": saving.number}
        self.files.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        checkpoint = self.files.load_checkpoint(path, *args, **options)
        if _KEY not in checkpoint:
            raise CheckpointError(
                f"{path} was written without skirl.lightning.Rows and has no rows: use a checkpoint that has"
            )
        about = checkpoint[_KEY]
        header = folder.header(Path(os.path.realpath(path)).parent / about["rows"], about["number"])
        load(header, model=self.rows.trainer.lightning_module, data=self.rows.data())
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        self.files.remove_checkpoint(path)
        shutil.rmtree(_beside(path), ignore_errors=True)

    def teardown(self) -> None:
        self.files.teardown()


def _beside(path: Any) -> Path:
    return Path(path).with_name(f"{Path(path).name}.rows")
