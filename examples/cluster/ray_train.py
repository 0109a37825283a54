"""Train in a Ray cluster: `python ray_train.py /shared/run 4`, with a folder for checkpoints and the number of trainers.

Ray Train starts the processes, tells each its rank in the environment, and starts all again when one is lost. The run then
continues from its last checkpoint. Each trainer is a process with one thread, because bits depend on the number of threads.
"""

import json
import sys
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

FLAGS: dict[str, Any] = {
    "data": "synthetic:tiny",
    "model": "dlrm-tiny",
    "dim": 4,
    "batch": 64,
    "steps": 40,
    "cache": "2000",
    "shards": 4,
    "save_every": 10,
    "resume": True,
    "threads": 1,
    "quiet": True,
}


def trainer(flags: dict[str, Any]) -> None:
    """Train as one of the trainers."""
    import ray.train

    from skirl.cli.train import Train

    found = Train.of(**flags).run()
    if found["failed"]:
        raise RuntimeError(found["failed"])
    ray.train.report({"steps": found["steps"], "loss": found["loss"]["last"], "trainers": found["trainers"]})


def main(folder: str, trainers: int) -> None:
    """Start all trainers, and print the result of the run."""
    job: Any = TorchTrainer(
        trainer,
        train_loop_config=FLAGS | {"save": Path(folder) / "saves", "run": f"{folder}/run"},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=trainers, use_gpu=False),
        run_config=RunConfig(name="skirl", storage_path=folder, failure_config=FailureConfig(max_failures=-1)),
    )
    job.fit()
    result = json.loads((Path(folder) / "run" / "result.json").read_text())
    print({name: result[name] for name in ("steps", "trainers")})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
