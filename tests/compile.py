"""Compiles the kernels that most tests use: `python -m tests.compile`, before several processes would each compile them.

What it runs is checked by tests, so a failure here is only said.
"""

import io
import tempfile
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import torch

from skirl.cli import main as skirl
from tests.data import logs
from tests.faults.battery import run_battery

FLAGS = "--model dlrm-tiny --dim 8 --batch 64 --cache 4000 --threads 1 --steps 3 --run none --quiet --json"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failed = run_battery(sound=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs.write_tsv(folder / "log.tsv", logs.criteo_rows(300))
        saved = ["--store", f"disk:{folder / 'rows'}", "--save", str(folder / "saves")]
        for data in (
            ["--data", f"criteo:{folder / 'log.tsv'}", "--rows", "500", "--valid", "20%"],
            ["--data", "synthetic:tiny", *saved],
        ):
            with redirect_stdout(io.StringIO()):
                failed = skirl(["train", *data, *FLAGS.split()]) or failed
    if failed:
        print(f"not all kernels were compiled: {failed}")


if __name__ == "__main__":
    main()
