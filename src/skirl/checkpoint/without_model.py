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
from skirl.checkpoint.votes import agreed, take_newest
from skirl.core import initial
from skirl.core.initial import Given
from skirl.core.optim import row_optimizer
from skirl.core.tables import Table
from skirl.engine.device import HALVES
from skirl.engine.work import Counters
from skirl.nn.collection import Collection, EmbeddingBagCollection, EmbeddingCollection, collections_of
from skirl.peers.base import Alone, Peers
from skirl.peers.job import using

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
    peers = peers or Alone()

    with ExitStack() as stack:  # closes also what was opened of one that is damaged for another trainer

        def take(header: Path, _: str) -> Opened:
            found = _open(header)
            for collection in collections_of(found.rows).values():
                stack.callback(collection.engine.store.close)
            return found

        yield take_newest(Path(path), peers, lambda *of: agreed(peers, lambda: take(*of), "another run's rows"))[1]


def _open(header: Path) -> Opened:
    body = folder.read(header)
    tensors = codec.read_dense(header.parent, body["dense"])
    rows_of = rows_for(body, Alone(), {})
    collections = [
        _rows_of(header, about, rows_of[name], body["run"]["rows"][name]["table_steps"])
        for name, about in body["definition"].items()
    ]
    data = loader_state(decode(body["run"]["data"], tensors))
    rows = collections[0] if len(collections) == 1 else nn.ModuleList(collections)
    prefix = "model.state."
    return Opened(rows, {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}, data, header)


def _rows_of(header: Path, definition: dict[str, Any], rows: OwnRows, steps: list[int]) -> Collection:
    files = header.parent / folder.ROWS
    rows.check(files)
    kind = _KINDS[definition["collection"]]
    with using(Alone()):  # only this process reads the rows of these embeddings
        collection = kind(**_arguments(definition), cache=1, store="checkpoint")
    engine = collection.engine
    engine.restore(lambda: rows.thaw(engine, files), table_steps=steps, counters=Counters())
    return collection


def _arguments(definition: dict[str, Any]) -> dict[str, Any]:
    def of(kind: Callable[[str], Any], fields: dict[str, Any]) -> Any:
        fields = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return kind(fields.pop("type"))(**fields)

    tables, optimizers = [], {}
    for fields in definition["tables"]:
        of_table = {name: value for name, value in fields.items() if name not in ("optimizer", "pattern", "frozen")}
        absent = partial(Given.absent, fields["rows"], fields["dim"])  # an array is known only by its digest
        kinds = _INITIAL | {"Given": absent}
        of_table |= {"features": tuple(fields["features"]), "init": of(kinds.__getitem__, fields["init"])}
        tables.append(Table(**of_table))
        optimizers[escape(fields["name"])] = of(row_optimizer, fields["optimizer"])
    dtype = _DTYPES[definition["dtype"]]
    return {"tables": tables, "optimizer": optimizers, "seed": definition["seed"], "dtype": dtype}
