"""`skirl launch`: several trainers on this machine, started and watched by torchrun."""

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from skirl.peers.processes import NOTES, STOPPED

SETTINGS = {
    # Otherwise the trainers' store would be the launcher's, which listens on all networks.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # The bits of a run depend on its number of threads, so that must not depend on the number of trainers.
    "OMP_NUM_THREADS": "1",
}
"""Environment variables of trainers, unless the user has set them."""
LOOPBACK = "127.0.0.1"


def launch(words: Sequence[str], trainers: int, restarts: int) -> tuple[int, str | None, bool]:
    """Start trainers and wait. Return the exit code, how the job ended if not well, and whether it may go on from there."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    for begun in range(1, restarts + 1):
        code, how, resumes = _job(words, trainers)
        if not code or not resumes:
            return code, how, resumes
        print(f"skirl launch: {how}; all start again, restart {begun} of {restarts}", file=sys.stderr, flush=True)
    return _job(words, trainers)


def _job(words: Sequence[str], trainers: int) -> tuple[int, str | None, bool]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the end is told here, in one line
    script = words[0].endswith(".py")
    arguments = ["-u", *(words if script else ("-m", "skirl", *words))]
    with tempfile.TemporaryDirectory(prefix="skirl-launch-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=trainers,
            run_id="skirl",
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(folder) / "rendezvous"),  # a file, because others could reach a port
            rdzv_configs={"store_type": "file"},
            local_addr=LOOPBACK,
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder) / "logs")),
        )
        os.environ[NOTES] = folder
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as failed:
            return _why({rank: of.exitcode for rank, of in failed.failures.items()}, Path(folder))
        except SignalException as told:
            if Path(folder, STOPPED).exists():
                return 130 if told.sigval is signal.SIGINT else 0, None, False
            return 128 + told.sigval, f"stopped by {told.sigval.name}, and all trainers with it", False
    return 0, None, False


def _why(codes: Mapping[int, int], folder: Path) -> tuple[int, str, bool]:
    """Return the exit code of the trainer that has the reason, and how it ended; others have only lost it. Also whether it
    was not refused at once."""
    notes = {int(path.name): json.loads(path.read_bytes()) for path in folder.iterdir() if path.name.isdecimal()}
    silent = [rank for rank in codes if rank not in notes and codes[rank] != -signal.SIGTERM]  # the launcher's
    killed = [rank for rank in silent if codes[rank] < 0]
    said = [rank for rank, note in notes.items() if not note["lost"]]
    rank = [*killed, *said, *silent, *codes][0]
    code = max(codes.get(rank, 1), 1) if rank in said else codes.get(rank, 1)  # the launcher ends who has said why
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    step = max((note["step"] for note in notes.values() if note["step"] is not None), default=None)
    at = "" if step is None else f" in step {step:,}"
    text = f"rank {rank} {how}{at}" + "; it said why above" * (rank in said)
    return 128 - code if code < 0 else code, text, step is not None or rank not in said
