"""Loss, AUC and speed of a run so far: what its progress shows and its result sums up.

Sums and a running digest instead of a list: a run of a million steps keeps 4 MiB, the AUC's bins. Equal digests mean equal
losses to the last bit, step by step, which is how a change that is not numeric is told from one that is.
"""

import hashlib
import time
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor

from skirl.lookahead import Lookahead
from skirl.metrics import StreamingAUC
from skirl.progress import Facts


class Meter:
    """Watches a run; part of its checkpoint, but for the speed.

    >>> meter = Meter()
    >>> meter.add(0.7, torch.tensor([1.0, -1.0]), torch.tensor([1.0, 0.0]))
    >>> meter.result()["auc"], meter.result()["loss"]["mean"]
    (1.0, 0.7)
    """

    def __init__(self) -> None:
        self.auc = StreamingAUC()
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._so_far = {"steps": 0, "samples": 0, "first": nan, "last": nan, "sum": 0.0, "digest": ""}
        self._started = time.monotonic()
        self._warm: tuple[float, int] | None = None
        self._shown = (self._started, 0, 0, 0.0)

    def add(self, loss: float, logits: Tensor, labels: Tensor) -> None:
        """One more step."""
        here = self._so_far
        here["first"] = here["first"] if here["steps"] else loss
        here["last"] = loss
        here["sum"] += loss
        here["digest"] = hashlib.blake2b(f"{here['digest']} {loss.hex()}".encode(), digest_size=16).hexdigest()
        here["steps"] += 1
        here["samples"] += len(labels)
        if self._warm is None:
            self._warm = (time.monotonic(), here["samples"])
        self._waiting.append((logits, labels))
        if len(self._waiting) * len(labels) >= 65536:  # its bins cost 1 ms, for one sample or for thousands
            self._settle()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        self._settle()
        return {"auc": self.auc.state_dict(), "so_far": dict(self._so_far)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.auc.load_state_dict(state["auc"])
        self._so_far.update(state["so_far"])
        self._shown = (time.monotonic(), self._so_far["steps"], self._so_far["samples"], self._so_far["sum"])

    def facts(self, batches: Lookahead) -> Facts:
        """What the progress shows: speed and loss since it was last asked, all else since the start."""
        self._settle()
        now, engine, here = time.monotonic(), batches.engine, self._so_far
        since, steps, samples, losses = self._shown
        self._shown = (now, here["steps"], here["samples"], here["sum"])
        moved = engine.counters
        filled = sum(cache.filled for cache in engine.caches) / max(1, sum(len(cache) for cache in engine.caches))
        return {
            "samples/s": f"{(here['samples'] - samples) / max(now - since, 1e-9):,.0f}",
            "loss": f"{(here['sum'] - losses) / max(1, here['steps'] - steps):.4f}",
            "AUC": f"{self.auc.value():.4f}",
            "fetched": f"{moved.fetched:,}",
            "new": f"{moved.new:,}",
            "written": f"{moved.written:,}",
            "cache": f"{filled:.0%} full",
            "hidden": f"{batches.times.hidden:.0%}",
            "window": f"{batches.window} batches",
        }

    def result(self) -> dict[str, Any]:
        """The whole run."""
        self._settle()
        now, here = time.monotonic(), self._so_far
        since, before = self._warm or (now, here["samples"])
        return {
            "samples": here["samples"],
            "seconds": now - self._started,
            "samples_per_second": (here["samples"] - before) / max(now - since, 1e-9),
            "loss": {
                "first": here["first"],
                "last": here["last"],
                "mean": here["sum"] / max(1, here["steps"]),
                "digest": here["digest"],
            },
            "auc": None if isnan(auc := self.auc.value()) else auc,
        }

    def _settle(self) -> None:
        if self._waiting:
            logits, labels = zip(*self._waiting)
            self.auc.update(torch.cat(logits), torch.cat(labels))
            self._waiting.clear()
