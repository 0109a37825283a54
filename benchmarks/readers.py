"""Claim: text and Parquet are read far faster than TorchRec's preprocessing reads text ("Readers" in docs/benchmarks.md).

Memory stays the same however much is read.
"""

import gc
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from resource import getpagesize
from typing import Any

import numpy as np
import torch

from common import Bench, Stopwatch, main, result
from skirl.cli.files import Convert
from skirl.data.flags import DataFlags
from skirl.data.synthetic import Synthetic


@dataclass(frozen=True)
class Readers(Bench):
    """Rows per second from files to batches, and memory over a long stream."""

    samples: int = 300_000
    """Rows in the file."""
    peer_samples: int = 20_000
    """Rows for TorchRec to read, which holds them as Python lists."""
    batch: int = 4096
    """Samples in a batch."""
    rounds: int = 5
    """Number of times that each reader reads the file; the median is reported."""
    stream_gb: float = 1.0
    """Gigabytes of text to read to see whether memory grows; 0 skips this."""

    def run(self) -> dict[str, Any]:
        """Write the file in each form and time reading each, TorchRec last."""
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(prefix="skirl-readers-") as folder:
            text = Path(folder) / "day_0.tsv"
            lines = criteo_lines(self.samples)
            text.write_bytes(b"".join(lines))
            few = Path(folder) / "few.tsv"
            few.write_bytes(b"".join(lines[: self.peer_samples]))
            rows, prints = f"{folder}/rows.parquet", f"{folder}/fingerprints.parquet"
            Convert(f"criteo:{text}", rows, rows="1000000", quiet=True).run()
            Convert(f"criteo:{text}", prints, quiet=True).run()
            sources = {"text": f"criteo:{text}", "converted": f"parquet:{rows}", "fingerprints": f"parquet:{prints}"}
            read = {
                name: self._read(data, None if name == "converted" else "1000000") for name, data in sources.items()
            }
            other = self._torchrec(few)
            return result(
                "readers", self, "samples batch rounds",
                rows_per_s=read,
                torchrec=other,
                times_torchrec=None if other is None else read["text"]["per_cpu_s"] / other["per_cpu_s"],
                memory=self._memory(str(text)) if self.stream_gb else None,
            )  # fmt: skip

    def _read(self, data: str, rows: str | None) -> dict[str, float]:
        files = DataFlags(data, batch=self.batch, rows=rows).stream()
        sum(len(batch.labels) for batch in files)  # the first pass compiles
        return _rates(lambda: sum(len(batch.labels) for batch in files), self.rounds)

    def _memory(self, text: str) -> dict[str, float]:
        """Read the text over and over and fit how the resident size grows with the bytes read."""
        size = Path(text).stat().st_size
        times = max(4, round(self.stream_gb * 1e9 / size))
        files = DataFlags(f"criteo:{','.join([text] * times)}", batch=self.batch).stream()
        read, resident = [], []
        every = max(1, times * self.samples // self.batch // 200)
        for number, _ in enumerate(files):
            if number % every == 0:
                read.append(number * self.batch / self.samples * size / 1e9)
                resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize() / (1 << 20))
        half = len(read) // 4  # leaves out the beginning, with what is allocated once
        slope = float(np.polyfit(read[half:], resident[half:], 1)[0])
        return {"gb": times * size / 1e9, "slope_mb_per_gb": slope}

    def _torchrec(self, text: Path) -> dict[str, float] | None:
        if not all(map(find_spec, ("torchrec", "iopath"))):
            return None
        utils = import_module("torchrec.datasets.criteo").BinaryCriteoUtils
        samples = min(self.peer_samples, self.samples)
        outs = [str(text.with_suffix(f".{name}.npy")) for name in ("dense", "sparse", "labels")]

        def read() -> int:
            utils.tsv_to_npys(str(text), *outs, dataset_name="criteo_kaggle")
            return samples

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # it leaves its files to the garbage collector
            rates = _rates(read, rounds=3)
            gc.collect()
        return {**rates, "samples": samples}


def _rates(read: Callable[[], int], rounds: int) -> dict[str, float]:
    """Return rows per second and per CPU second of a call that returns how many it read."""
    rates, cpu = [], []
    for _ in range(rounds):
        with Stopwatch() as watch:
            rows = read()
        rates.append(rows / watch.seconds)
        cpu.append(rows / watch.cpu)
    return {"median": float(np.median(rates)), "per_cpu_s": float(np.median(cpu))}


def criteo_lines(samples: int) -> list[bytes]:
    """Return lines of text in Criteo's layout, with the skew of Criteo Kaggle."""
    lines = []
    for batch in Synthetic("criteo-kaggle", min(samples, 8192), batches=-(-samples // 8192)):
        n = len(batch.labels)
        ids = batch.sparse.values().view(26, n).t().mul(0x9E3779B1).bitwise_and(0xFFFFFFFF).tolist()
        numbers = batch.dense.abs().mul(2).exp().long().tolist()
        for label, dense, values in zip(batch.labels.long().tolist(), numbers, ids):
            texts = ["" if x % 7 == 3 else str(x) for x in dense] + ["" if x % 23 == 5 else f"{x:08x}" for x in values]
            lines.append(f"{label}\t{chr(9).join(texts)}\n".encode())
    return lines[:samples]


if __name__ == "__main__":
    main(Readers)
