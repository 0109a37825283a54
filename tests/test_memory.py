"""Training tables of 882.8 million rows takes only the memory that the rows in use need, and does not grow beyond it."""

import json

import pytest

from skirl.data.synthetic import SHAPES
from tests.processes import interpreter
from tests.warm import Python

MB = 1 << 20
BATCH, DEPTH, CACHE, DIM = 512, 32, 40_000, 16
RUN = """
import json, os, re, sys
import torch
from numba.core import event
import skirl
from skirl.data import Synthetic
from skirl.pipeline.reader import weigh

torch.set_num_threads(1)
compiled = event.RecordingListener()
event.register("numba:compile", compiled)
batch, depth, cache, dim, steps = map(int, sys.argv[1:])
data = Synthetic("criteo-terabyte", batch_size=batch, batches=steps)
embeddings = skirl.EmbeddingBagCollection(data.tables(dim), optimizer=skirl.RowwiseAdagrad(lr=0.1), cache=cache)
rows, resident = [], []
with skirl.lookahead(data, embeddings, depth=depth) as batches:
    for batch in batches:
        embeddings(batch.sparse).stacked().sum().backward()
        with open("/proc/self/statm") as file:
            resident.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        rows.append(len(embeddings.engine.store))
# Not getrusage: its peak is that of the process that started this one, if that was larger.
with open("/proc/self/status") as file:
    peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", file.read())[1]) * 1024
print(json.dumps({
    "peak": peak,
    "batch": weigh(batch),
    "record": embeddings.engine.packs[0].widths[0] * 4,
    "rows": rows,
    "resident": resident,
    "fetched": embeddings.engine.counters.fetched,
    "compiled": len(compiled.buffer),
}))
"""


@pytest.fixture(scope="module")
def run(python: Python) -> dict:
    """Run in a separate process, because peaks of one process cannot be told apart."""
    for steps, process in ((40, python.run), (300, interpreter)):  # the first one compiles kernels, which takes 100 MB
        result = process(RUN, *(str(size) for size in (BATCH, DEPTH, CACHE, DIM, steps)), timeout=140)
        assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert not said["compiled"]
    return said


def test_the_peak_is_bit_map_cache_window_touched_rows_and_600_mb(run):
    """For the whole process, including Python, torch and Numba."""
    bit_map = sum(SHAPES["criteo-terabyte"].rows.values()) / 8
    cache = CACHE * run["record"]
    window = DEPTH * run["batch"]
    touched = run["rows"][-1] * run["record"]
    bound = bit_map + cache + window + touched + 600 * MB
    assert run["fetched"] > 10_000 and run["rows"][-1] > 10 * CACHE  # rows come and go
    assert run["peak"] < bound, f"{run['peak'] / MB:.0f} MB, the bound is {bound / MB:.0f} MB"


def test_a_long_stream_grows_by_the_rows_that_it_stores(run):
    """From one half of the run to the other: the payload of the new rows, 20 bytes per row besides, and 16 MB."""
    half = len(run["rows"]) // 2
    rows = run["rows"][-DEPTH] - run["rows"][half]
    grown = run["resident"][-DEPTH] - run["resident"][half]
    assert rows > 50_000
    assert grown < rows * (run["record"] + 20) + 16 * MB
