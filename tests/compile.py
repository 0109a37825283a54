"""Compile or load the kernels that most tests use, for `--warm`, before several processes would each compile them.

Tests check what it runs, so a failure here is only reported.
"""

import io
import tempfile
import warnings
from contextlib import redirect_stdout
from pathlib import Path

from skirl.cli import main as skirl
from tests.data import logs
from tests.faults.battery import run_battery

FLAGS = "--model dlrm-tiny --batch 64 --cache 4000 --threads 1 --steps 3 --run none --quiet --json"


def compile_kernels() -> str | None:
    """Compile the kernels. Return what failed, if anything did."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as name:
        warnings.simplefilter("ignore")
        failed = run_battery(sound=True)
        folder = Path(name)
        logs.write_tsv(folder / "log.tsv", logs.criteo_rows(300))
        saved = ["--store", f"disk:{folder / 'rows'}", "--save", str(folder / "saves")]
        for data in (
            ["--data", f"criteo:{folder / 'log.tsv'}", "--rows", "500", "--valid", "20%", "--dim", "8"],
            ["--data", "synthetic:tiny", *saved, "--dim", "16"],  # rows of dim 16 have specialized loops
        ):
            with redirect_stdout(io.StringIO()):
                failed = skirl(["train", *data, *FLAGS.split()]) or failed
        return str(failed) if failed else None
