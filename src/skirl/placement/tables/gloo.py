"""Measuring how long ranks exchange pooled rows and their gradients: processes on this machine, torch's gloo."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

LONGEST = 300.0
"""Seconds that all rounds may take."""


def exchanged(dims: np.ndarray, starts: np.ndarray, batch: int, rounds: int, seconds: float = LONGEST) -> np.ndarray:
    """Return the milliseconds of each rank from its start to its end, [rounds, forward and backward, cases, ranks].

    Forward, a rank starts when it has its pooled vectors, and sends each rank those of that rank's share of the
    samples. Backward, all start at once, and gradients go the other way.

    **Arguments**

    - `dims`: columns that each rank has, [cases, ranks].
    - `starts`: milliseconds after which each rank starts forward, in the same shape.
    - `batch`: samples of all ranks.
    - `rounds`: number of rounds; each goes through all cases.
    - `seconds`: the timeout.
    """
    ranks = dims.shape[1]
    with tempfile.TemporaryDirectory() as folder:
        said = {"dims": dims.tolist(), "starts": starts.tolist(), "batch": batch, "rounds": rounds, "folder": folder}
        others = [
            subprocess.Popen([sys.executable, "-m", "skirl.placement.tables.gloo", json.dumps(said | {"rank": rank})])
            for rank in range(ranks)
        ]
        try:
            until = time.monotonic() + seconds
            for other in others:
                if other.wait(max(0.1, until - time.monotonic())):
                    raise RuntimeError("a process that exchanges rows failed; its error is above")
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"exchanging took more than {seconds:g} s: measure again when the machine is idle"
            ) from None
        finally:
            for other in others:
                other.kill()
                other.wait()
        return np.stack([np.load(Path(folder, f"{rank}.npy"), allow_pickle=False) for rank in range(ranks)], axis=-1)


def main(said: dict[str, Any]) -> None:
    """Run one rank.

    **Arguments**

    - `said`: what `exchanged` asks for, and the number of the rank.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, dims, starts = said["rank"], said["dims"], said["starts"]
    ranks, cases = len(dims[0]), len(dims)
    meet = dist.FileStore(str(Path(said["folder"], "meet")), ranks)
    dist.init_process_group("gloo", store=meet, rank=rank, world_size=ranks, timeout=timedelta(seconds=LONGEST))
    samples = said["batch"] // ranks
    found = np.zeros((said["rounds"], 2, cases))
    mine, most = max(of[rank] for of in dims), max(map(sum, dims))
    own, all_of = torch.ones(samples * ranks * mine), torch.ones(samples * most)
    for number in range(said["rounds"]):
        order: Sequence[int] = np.random.default_rng(number).permutation(cases).tolist()
        for case in order:
            sends = [samples * dims[case][rank]] * ranks
            gets = [samples * dim for dim in dims[case]]
            dist.barrier()
            time.sleep(starts[case][rank] / 1e3)
            found[number, 0, case] = _ms(dist, all_of[: sum(gets)], own[: sum(sends)], gets, sends)
            dist.barrier()
            found[number, 1, case] = _ms(dist, own[: sum(sends)], all_of[: sum(gets)], sends, gets)
    np.save(Path(said["folder"], f"{rank}.npy"), found)
    dist.barrier()
    dist.destroy_process_group()


def _ms(dist: Any, to: Any, of: Any, gets: list[int], sends: list[int]) -> float:
    began = time.perf_counter()
    dist.all_to_all_single(to, of, gets, sends)
    return 1e3 * (time.perf_counter() - began)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
