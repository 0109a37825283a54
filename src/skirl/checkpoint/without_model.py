"""Open the rows of a checkpoint without the model that trained them, for `skirl export` and `skirl.import_rows`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from skirl.checkpoint import codec, folder
from skirl.checkpoint.codec import decode, loader_state
from skirl.checkpoint.rows import OwnRows, rows_for
from skirl.checkpoint.votes import Votes, take_newest
from skirl.core import initial
from skirl.core.groups import Groups
from skirl.core.initial import Given
from skirl.core.optim import row_optimizer
from skirl.core.tables import Schema, Table
from skirl.engine.device import HALVES
from skirl.engine.work import Counters
from skirl.nn.collection import Collection, EmbeddingBagCollection, EmbeddingCollection, collections_of
from skirl.peers.base import Alone, Peers
from skirl.peers.job import using
from skirl.tools.sealed_json import COUNT, CheckpointError, misfit

_INITIAL = {kind.__name__: kind for kind in (initial.Uniform, initial.Normal, initial.Constant)}
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, *HALVES)}
_KINDS = {kind.__name__: kind for kind in (EmbeddingBagCollection, EmbeddingCollection)}


class Opened(NamedTuple):
    rows: nn.Module
    dense: dict[str, torch.Tensor]
    data: Any
    header: Path


@contextmanager
def opened(path: str | Path, peers: Peers | None = None) -> Iterator[Opened]:
    """Open embeddings with all rows of the newest undamaged checkpoint, and its other content, for the length of a block.
    Files of rows are hard-linked into a temporary folder next to the checkpoint."""
    votes = Votes(peers or Alone())

    with ExitStack() as stack:  # closes also what was opened of one that is damaged for another trainer

        def take(header: Path, _: str) -> Opened:
            found = _open(header)
            for collection in collections_of(found.rows).values():
                stack.callback(collection.engine.store.close)
            return found

        yield take_newest(Path(path), votes, lambda *of: votes.agreed(lambda: take(*of), "another run's rows"))[1]


def _open(header: Path) -> Opened:
    body = folder.read(header)
    try:
        tensors = codec.read_dense(header.parent, body["dense"])
        rows_of = rows_for(body, Votes(Alone()), {})
        collections = [
            _rows_of(header, about, rows_of[name], body["run"]["rows"][name]["table_steps"])
            for name, about in body["definition"].items()
        ]
        data = loader_state(decode(body["run"]["data"], tensors))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{header} is incomplete or damaged ({error!r}): use another checkpoint") from error
    if not collections:
        raise CheckpointError(f"{header} has no rows: use another checkpoint")
    rows = collections[0] if len(collections) == 1 else nn.ModuleList(collections)
    prefix = "model.state."
    return Opened(rows, {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}, data, header)


def _rows_of(header: Path, definition: dict[str, Any], rows: OwnRows, steps: Any) -> Collection:
    files = header.parent / folder.ROWS
    kind, about = _described(header, definition)
    rows.check(files)
    if misfit(steps, [COUNT]) is not None or len(steps) != len(about["tables"]):
        raise CheckpointError(f"{header} counts the steps of other tables than it has: use another checkpoint")
    with using(Alone()):  # only this process reads the rows of these embeddings
        collection = kind(**about, cache=1, store="checkpoint")
    engine = collection.engine
    engine.restore(lambda: rows.thaw(engine, files), table_steps=steps, counters=Counters())
    return collection


def _described(header: Path, definition: dict[str, Any]) -> tuple[type[Collection], dict[str, Any]]:
    def of(kind: Callable[[str], Any], fields: dict[str, Any]) -> Any:
        fields = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return kind(fields.pop("type"))(**fields)

    try:
        tables, optimizers = [], {}
        for fields in definition["tables"]:
            of_table = {name: value for name, value in fields.items() if name not in ("optimizer", "pattern", "frozen")}
            absent = partial(Given.absent, fields["rows"], fields["dim"])  # an array is known only by its digest
            kinds = _INITIAL | {"Given": absent}
            of_table |= {"features": tuple(fields["features"]), "init": of(kinds.__getitem__, fields["init"])}
            tables.append(Table(**of_table))
            optimizers[escape(fields["name"])] = of(row_optimizer, fields["optimizer"])
        Groups(Schema.of(tables).tables, optimizers)
        seed = definition["seed"]
        if (wrong := misfit(seed, COUNT, "seed")) is not None:
            raise ValueError(wrong)
    except ValueError as error:
        raise CheckpointError(f"{header} describes impossible embeddings ({error}): use another checkpoint") from None
    about = {"tables": tables, "optimizer": optimizers, "seed": seed, "dtype": _DTYPES[definition["dtype"]]}
    return _KINDS[definition["collection"]], about
