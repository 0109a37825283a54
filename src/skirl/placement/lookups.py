"""What batches look up in tables: counted in data, or drawn at random as tables are known."""

from dataclasses import dataclass, field

import numpy as np

from skirl.core.keys import ROW_BITS
from skirl.core.tables import Schema
from skirl.placement.pieces import Piece
from skirl.placement.spec import BINS, TableSpec, reuse_of
from skirl.tools.progress import progress_of
from skirl.train.loop import keys_of
from skirl.train.recipe import Recipe

_ODD = 2654435761
_ACTIVE, _HEAD = 0.08, 2.5
"""The share of a generated table's rows that are looked up at all, and the largest exponent of ten of how many of them
are looked up alike, before Zipf's law begins."""


def count_tables(recipe: Recipe) -> list[TableSpec]:
    """Return the tables of a run, with what its batches look up in each."""
    schema, stream = Schema.of(list(recipe.tables())), recipe.stream()
    ids, distinct = np.zeros(len(schema.tables)), np.zeros(len(schema.tables))
    reuse, batches = np.zeros((len(schema.tables), BINS)), 0
    with progress_of("read", stream.steps) as progress:
        for batch in stream:
            batches += 1
            keys, counts = np.unique(keys_of(batch.sparse, schema), return_counts=True)
            table = keys >> ROW_BITS
            for n in np.unique(table).tolist():
                of_table = counts[table == n]
                ids[n] += of_table.sum()
                distinct[n] += len(of_table)
                reuse[n] += len(of_table) * np.array(reuse_of(of_table))
            progress(batches, dict)
    size, optimizer = recipe.data.batch, recipe.optimizer.optimizer
    if not batches:
        raise ValueError(f"{recipe.data.data} has no batch of {size:,} samples: set batch smaller")
    return [
        TableSpec(
            t.name, t.rows, t.dim, size, float(ids[n] / batches), float(distinct[n] / batches),
            tuple((reuse[n] / max(1, distinct[n])).tolist()), optimizer,
        )
        for n, t in enumerate(schema.tables)
    ]  # fmt: skip


def generate(count: int, *, batch: int, max_dim: int, seed: int, optimizer: str) -> list[TableSpec]:
    """Return random tables of any size and reuse, of which one in three has a single id for each sample."""
    rng, specs = np.random.default_rng(seed), []
    dims = [1 << n for n in range(2, max_dim.bit_length())]
    for n in range(count):
        rows, pooling = int(10 ** rng.uniform(1, 7.3)), 1.0 if n % 3 == 0 else 10 ** rng.uniform(0, 2)
        head, ids = float(10 ** rng.uniform(0, _HEAD)), round(batch * pooling)
        active = max(head, rows * _ACTIVE)
        rank = (((active / head + 1) ** rng.random(ids) - 1) * head).astype(np.int64)
        counts = np.unique(rank * _ODD % rows, return_counts=True)[1]
        facts = (float(ids), float(len(counts)), reuse_of(counts), optimizer)
        specs.append(TableSpec(f"table-{n}", rows, int(rng.choice(dims)), batch, *facts))
    return specs


def draw_ids(spec: TableSpec, rng: np.random.Generator) -> np.ndarray:
    """Return random rows that a batch looks up: as many, as many distinct ones, and as often as the spec says.

    >>> ids = draw_ids(TableSpec("a", rows=1000, dim=8, batch=4, ids=64.0, distinct=9.0), np.random.default_rng(0))
    >>> len(ids), len(np.unique(ids))
    (64, 9)
    """
    count = max(1, round(spec.distinct))
    begins = np.arange(count + 1) * spec.rows // count
    rows = begins[:-1] + (rng.random(count) * np.diff(begins)).astype(np.int64)  # one in each stretch
    if spec.reuse:
        often = 2.0 ** np.repeat(np.arange(len(spec.reuse)), rng.multinomial(count, np.array(spec.reuse))) - 1
    else:
        often = 1 / np.arange(1.0, count + 1)
    rng.shuffle(often)
    more = max(0, round(spec.ids) - count)
    often = often if often.sum() > 0 else np.ones(count)
    ids = np.repeat(rows, 1 + rng.multinomial(more, often / often.sum()))
    rng.shuffle(ids)
    return ids


@dataclass
class Lookups:
    """A random batch of one table, shared by all its parts. Each `number` gives one batch; ids belong to random samples."""

    spec: TableSpec
    number: int
    ids: np.ndarray = field(init=False)
    bags: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.number)
        self.ids = draw_ids(self.spec, rng)
        self.bags = np.sort(rng.integers(0, self.spec.batch, len(self.ids)))

    def of(self, piece: Piece) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows, counted from the piece's first, and the bags of the ids that fall into a piece."""
        inside = (self.ids >= piece.row) & (self.ids < piece.row_end)
        return self.ids[inside] - piece.row, self.bags[inside]
