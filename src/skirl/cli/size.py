"""`skirl.size`, for a loader of one's own, and the lines that it and `skirl size` print."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from skirl.cli.show import columns, facts, listed
from skirl.core.batch import Sparse
from skirl.core.optim import RowOptimizer, RowwiseAdagrad
from skirl.core.tables import Table
from skirl.pipeline.lookahead import sparse_of
from skirl.sizing.size import KINDS, LEAST, sized


def size(
    loader: Iterable[Any],
    tables: Sequence[Table],
    *,
    sparse: Callable[[Any], Sparse] = sparse_of,
    optimizer: RowOptimizer | None = None,
    link: str | None = None,
    step_ms: float | None = None,
) -> dict[str, Any]:
    """Print how much cache a loop over this loader needs, as `skirl size` does. Return the advice: `cache`, `depth`, and
    what they move.

    **Arguments**

    - `loader`: batches of one epoch; a few hundred say enough: `itertools.islice(loader, 300)`.
    - `tables`: those of the collection: `embeddings.tables`, or `wrapped.embeddings.tables`.
    - `sparse`: as for `lookahead`.
    - `optimizer`: how rows will be trained, which says how large they are; None is `RowwiseAdagrad()`.
    - `link`, `step_ms`: rate and delay of the way to the store, "1Gbit,100us", and how long a step computes, if known.
    """
    found = sized(map(sparse, loader), tables, optimizer or RowwiseAdagrad(), 2, link, step_ms)
    lines = lines_of(found).items()
    print(listed({name: of.replace("--cache ", "cache=").replace(" --depth ", ", depth=") for name, of in lines}))
    return found["advice"]


def lines_of(result: Mapping[str, Any]) -> dict[str, str]:
    names = {LEAST: "least"} | {name: name for name in KINDS if name != LEAST}
    cells = [("rows", *names.values())]
    for i, point in enumerate(result["curves"][LEAST]):
        shares = (f"{result['curves'][name][i]['moved'] / max(1, result['used']):.2%}" for name in names)
        cells.append((f"{point['cache']:,}", *shares))
    lines = facts(result, "ids", "steps", "rows", "touched", "largest")
    lines["least cache"] = (
        f"--cache {result['least_cache']} holds every batch, and so does {result['least_cache_bytes']}B"
    )
    lines["moved"] = "rows refetched, of those that batches use"
    lines["cache"] = columns(cells, left=())
    return lines | facts(result, "bytes", "step_ms_that_hides") | {"advice": result["sentence"]}
