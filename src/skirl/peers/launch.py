"""`skirl launch`: several trainers on this machine, started and watched by torchrun."""

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

SETTINGS = {
    # Otherwise a restarted group would read the addresses of the previous one, and every restart would fail.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # The bits of a run depend on its number of threads, so that must not depend on the number of trainers.
    "OMP_NUM_THREADS": "1",
}
"""Environment variables of trainers, unless the user has set them."""
LOOPBACK = "127.0.0.1"
CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that torchrun's launcher takes for itself and does not give back."""


def launch(words: Sequence[str], trainers: int, restarts: int) -> tuple[int, str | None]:
    """Start trainers and wait. Return the exit code of the first one that failed and how it ended; 0 if none did."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

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
            max_restarts=restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder) / "logs")),
        )
        before = {name: signal.getsignal(name) for name in CAUGHT}
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as failed:
            rank, first = failed.get_first_failure()
            code = first.exitcode
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return 128 - code if code < 0 else code, f"trainer {rank} {how}; it said why above"
        except SignalException as told:
            return 128 + told.sigval, f"stopped by {told.sigval.name}, and all trainers with it"
        finally:
            if threading.current_thread() is threading.main_thread():  # in others the launcher takes no signal
                for name, handler in before.items():
                    signal.signal(name, handler)
    return 0, None
