"""`skirl train` killed while it trains and saves: `python -m tests.train_killed FOLDER KILLS SEED STORE`.

Runs are forked from this process, which has imported and compiled everything and has no threads. Each run resumes from
the newest whole checkpoint, saves every other step in the background, and is killed at a random moment; now and then a
file of the newest checkpoint is damaged before the next run starts. The last run is left to finish. Two lines of JSON
give its result, and the result of a run that was never killed.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skirl.checkpoint import folder as folders
from skirl.checkpoint import load, numbers
from skirl.cli.train import Train
from skirl.tools.sealed_json import CheckpointError
from skirl.train.metrics import Evaluation, Meter
from skirl.train.run_folder import RunFolder
from tests.killed import ended, forked, imported
from tests.processes import alone
from tests.resume import plain

FLAGS: dict[str, Any] = {
    "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 32, "cache": "400", "depth": 5,
}  # fmt: skip


def train(**flags: Any) -> Train:
    return Train.of(**{**FLAGS, "steps": 1_000_000, "optimizer": "adam", "threads": 1, "quiet": True, **flags})


def state_of(saves: Path, store: str) -> dict[str, str]:
    recipe = train(store=store).recipe
    embeddings, meter = recipe.embeddings(400), Meter()
    model, dense = recipe.model_over(embeddings)
    rates, evaluation = recipe.rates_of(embeddings, dense), Evaluation()
    folder = RunFolder("none", name="run", flags={}, resume=True)
    load(saves, model=model, optimizers=[dense, rates, meter, evaluation, folder])
    held = embeddings.engine.store
    keys = np.sort(np.concatenate([np.empty(0, np.int64), *held.held()]))
    rows = np.empty((len(keys), embeddings.engine.packs[0].widths[0]), np.float32)
    assert held.read(keys, rows).all()
    embeddings.close()
    parts = {"keys": keys.tobytes(), "rows": rows.tobytes(), "meter": repr(plain(meter.state_dict())).encode()}
    parts |= {name: value.numpy().tobytes() for name, value in model.state_dict().items() if hasattr(value, "numpy")}
    parts["dense"] = repr(plain(dense.state_dict())).encode()
    parts["rates"] = repr(plain(rates.state_dict())).encode()
    parts["table steps"] = repr(embeddings.engine.packs[0].steps.tolist()).encode()
    return {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}


def step_of(saves: Path) -> int:
    """Return the step of the newest checkpoint with a whole header."""
    for n in reversed(numbers(saves)):
        with contextlib.suppress(CheckpointError):
            return folders.read(folders.header(saves, n))["run"]["data"]["step"]
    return 0


def ended_well(child: Callable[[], object]) -> None:
    """Run a function that needs its own threads in a fork, and fail unless it ends well."""
    assert ended(*forked(lambda begins: child())) == 0


def damage(folder: Path, rng: random.Random) -> str:
    """Damage a file that only the newest checkpoint needs, so that the one before stays whole."""
    newest, *others = (folders.read(folders.header(folder, n)) for n in reversed(numbers(folder)))
    own = folders.files(newest) - set().union(*map(folders.files, others))
    names = [f"{name}/model.safetensors" if name.startswith("dense-") else name for name in own]
    names.append(folders.header(folder, numbers(folder)[-1]).name)
    path = folder / rng.choice(sorted(names))
    raw = bytearray(path.read_bytes())
    match rng.choice(["flip", "cut", "zero", "remove"]):
        case "flip":
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        case "cut":
            del raw[rng.randrange(len(raw)) :]
        case "zero":
            start = rng.randrange(len(raw))
            page = raw[start : start + 4096]
            raw[start : start + 4096] = bytes(255 - x for x in page[:1]) + bytes(len(page) - 1)
        case "remove":
            path.unlink()
            return path.name
    other = path.with_name("copy")  # one of the store's own files may have the same content under another name
    other.write_bytes(raw)
    os.replace(other, path)
    return path.name


def main() -> None:
    torch.set_num_threads(1)
    imported()
    folder, kills, rng, store = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3])), sys.argv[4]
    folder.mkdir(exist_ok=True)
    warm = {"store": f"disk:{folder / 'warm'}"} if store == "disk" else {}
    train(steps=30, save=folder / "warm-saves", save_every=3, **warm).run()
    alone()
    shutil.rmtree(folder / "warm-saves")
    shutil.rmtree(folder / "warm", ignore_errors=True)
    saves = folder / "saves"
    saves.mkdir()
    flags: dict[str, Any] = {"save": saves, "save_every": 2, "keep_last": 3, "resume": True}
    flags |= {"store": f"disk:{folder / 'rows'}"} if store == "disk" else {}
    for _ in range(kills):

        def child(begins: Callable[[], object]) -> None:
            wanted = max([0, *numbers(saves)]) + 2  # each process gets further than the one before

            def look() -> None:
                while max([0, *numbers(saves)]) < wanted:
                    time.sleep(0.002)
                begins()

            threading.Thread(target=look, daemon=True).start()
            train(**flags).run()

        pid, reading = forked(child)
        time.sleep(rng.uniform(0, 0.15))
        os.kill(pid, signal.SIGKILL)
        assert ended(pid, reading) == -signal.SIGKILL
        hurt = damage(saves, rng) if rng.random() < 0.3 and len(numbers(saves)) > 1 else "nothing"
        print(f"killed after step {step_of(saves)}, checkpoints {numbers(saves)}, damaged {hurt}", flush=True)
    steps = step_of(saves) + 10
    ended_well(lambda: train(**flags, steps=steps).run())
    ended_well(lambda: train(steps=steps, save=folder / "whole").run())
    other = f"disk:{folder / 'other'}" if store == "disk" else "memory"
    ended_well(lambda: print("resumed", json.dumps(state_of(saves, other)), flush=True))
    ended_well(lambda: print("whole", json.dumps(state_of(folder / "whole", "memory")), flush=True))


if __name__ == "__main__":
    main()
