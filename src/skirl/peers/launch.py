"""`skirl launch`: several trainers on this machine, started and watched by torchrun."""

import os
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass
class Launch:
    """Start the trainers of one job on this machine. They end together, and when this command does.

    What they run follows after `--`: a command of skirl with its flags, or a Python file.
    """

    trainers: int = 2
    """The number of trainers; -n for short."""
    restarts: int = 0
    """Number of times that all of them are restarted after one has failed; give --save and --resume to the command that they
    run."""

    def __post_init__(self) -> None:
        if self.trainers < 1:
            raise ValueError(f"trainers is {self.trainers}: set it to 1 or more")
        if self.restarts < 0:
            raise ValueError(f"restarts is {self.restarts}: set it to 0 or more")
        self.words: tuple[str, ...] = ()
        """The command after `--`."""

    def run(self) -> dict[str, Any]:
        """Start them and wait. The result's `exit_code` is that of the first one that failed, or 0."""
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        script = self.words[0].endswith(".py")
        arguments = ["-u", *(self.words if script else ("-m", "skirl", *self.words))]
        with tempfile.TemporaryDirectory(prefix="skirl-launch-") as folder:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=self.trainers,
                run_id="skirl",
                rdzv_backend="c10d",
                rdzv_endpoint=str(Path(folder) / "rendezvous"),  # a file, because others could reach a port
                rdzv_configs={"store_type": "file"},
                local_addr=LOOPBACK,
                max_restarts=self.restarts,
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
                print(f"skirl launch: trainer {rank} {how}; it said why above", file=sys.stderr)
                return {"exit_code": 128 - code if code < 0 else code}
            except SignalException as told:
                print(f"skirl launch: stopped by {told.sigval.name}, and all trainers with it", file=sys.stderr)
                return {"exit_code": 128 + told.sigval}
            finally:
                if threading.current_thread() is threading.main_thread():  # in others the launcher takes no signal
                    for name, handler in before.items():
                        signal.signal(name, handler)
        return {"exit_code": 0}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return nothing: trainers say what they did."""
        return {}
