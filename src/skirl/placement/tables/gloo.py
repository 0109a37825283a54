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


def exchanged(numbers: np.ndarray, starts: np.ndarray, rounds: int, seconds: float = LONGEST) -> np.ndarray:
    """Return the milliseconds of each rank from its start to its end, [rounds, forward and backward, cases, ranks].

    Forward, a rank starts when it has its vectors, and sends each rank those of that rank's samples. Backward, all start
    at once, and gradients go the other way.

    **Arguments**

    - `numbers`: how many numbers each rank has for each, [cases, ranks, ranks].
    - `starts`: milliseconds after which each rank starts forward, [cases, ranks].
    - `rounds`: number of rounds; each goes through all cases.
    - `seconds`: the timeout.
    """
    ranks = starts.shape[1]
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder, "numbers.npy"), numbers)
        np.save(Path(folder, "starts.npy"), starts)
        said = {"rounds": rounds, "seconds": seconds, "folder": folder}
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
    rank, folder = said["rank"], Path(said["folder"])
    numbers, starts = (np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("numbers", "starts"))
    cases, ranks = starts.shape
    meet, timeout = dist.FileStore(str(folder / "meet"), ranks), timedelta(seconds=said["seconds"])
    dist.init_process_group("gloo", store=meet, rank=rank, world_size=ranks, timeout=timeout)
    found = np.zeros((said["rounds"], 2, cases))
    own, all_of = (torch.ones(int(numbers.sum(axis=axis)[:, rank].max())) for axis in (2, 1))
    for number in range(said["rounds"]):
        order: Sequence[int] = np.random.default_rng(number).permutation(cases).tolist()
        for case in order:
            sends, gets = numbers[case, rank].tolist(), numbers[case, :, rank].tolist()
            dist.barrier()
            time.sleep(starts[case, rank] / 1e3)
            found[number, 0, case] = _ms(dist, all_of[: sum(gets)], own[: sum(sends)], gets, sends)
            dist.barrier()
            found[number, 1, case] = _ms(dist, own[: sum(sends)], all_of[: sum(gets)], sends, gets)
    np.save(folder / f"{rank}.npy", found)
    dist.barrier()
    dist.destroy_process_group()


def _ms(dist: Any, to: Any, of: Any, gets: list[int], sends: list[int]) -> float:
    began = time.perf_counter()
    dist.all_to_all_single(to, of, gets, sends)
    return 1e3 * (time.perf_counter() - began)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
