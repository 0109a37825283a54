"""What the fork server of tests/warm.py loads: torch, and skirl with the kernels of a short run."""

import contextlib
import gc
import io
import tempfile

import hypothesis  # noqa: F401
import numpy.testing  # noqa: F401
import pytest  # noqa: F401
import torch

from skirl.cli import main
from skirl.peers import job
from tests.processes import alone

torch.set_num_threads(1)

TRAIN = (
    "train --data synthetic:tiny --model dlrm-tiny --dim 4 --batch 64 --steps 3 --threads 1 --cache 500 --quiet --json"
)

with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
    saving = ["--run", "none", "--save", f"{folder}/saves", "--optimizer", "adam"]
    for more in (saving, [*saving, "--resume", "--steps", "5"], ["--run", "none", "--store", f"disk:{folder}/rows"]):
        main([*TRAIN.split(), *more])
job._joined.clear()
alone()
gc.collect()
gc.freeze()  # forks need not scan what exists now
