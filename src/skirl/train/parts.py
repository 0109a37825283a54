"""Metrics of several trainers, each over some batches, merged into those of one trainer with all batches."""

from collections.abc import Sequence

import numpy as np

from skirl.train.metrics import TOGETHER, Metrics, MetricSums, NotFinite, StreamingAUC, Values, sums_of

Arrays = Sequence[np.ndarray]
"""A part as it is exchanged: arrays of one dimension, in a fixed order."""


class MetricsPart:
    """The metrics of one trainer's batches. Each batch has its number in the stream, which orders the merged parts.

    >>> first, second, alone = MetricsPart(), MetricsPart(), Metrics()
    >>> first.update(0, np.array([0.3, -2.0]), np.array([1, 0]))
    >>> second.update(1, np.array([0.1, 0.2]), np.array([0, 1]))
    >>> for logits, labels in (([0.3, -2.0], [1, 0]), ([0.1, 0.2], [0, 1])):
    ...     alone.update(np.array(logits), np.array(labels))
    >>> merged([second.arrays(), first.arrays()]).scores() == alone.scores()
    True
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._sums: list[MetricSums] = []
        self._wrong: list[tuple[int, int, int]] = []
        """For each batch with logits that are not finite: its number, how many are not, of how many."""
        self._auc = StreamingAUC()
        self._waiting: list[tuple[Values, Values]] = []

    def update(self, number: int, logits: Values, labels: Values) -> None:
        """Add a batch. Logits that are not finite are an error of all trainers, raised when the parts are merged."""
        try:
            sums = sums_of(logits, labels)
        except NotFinite as wrong:
            self._wrong.append((number, wrong.found, wrong.of))
            return
        self._numbers.append(number)
        self._sums.append(sums)
        self._waiting.append((logits, labels))
        if len(self._waiting) * len(labels) >= TOGETHER:
            self._settle()

    def _settle(self) -> None:
        self._auc.update_all(self._waiting)
        self._waiting.clear()

    def arrays(self) -> list[np.ndarray]:
        """Return all of it, for an exchange."""
        self._settle()
        bins, counts = self._auc.counted()
        return [
            np.array(self._numbers, np.int64),
            np.array([(sums.samples, sums.clicks) for sums in self._sums], np.int64).reshape(-1),
            np.array([(sums.loss, sums.predicted) for sums in self._sums], np.float64).reshape(-1),
            np.array(self._wrong, np.int64).reshape(-1),
            bins,
            counts.reshape(-1),
        ]


def merged(parts: Sequence[Arrays], into: Metrics | None = None) -> Metrics:
    """Return the metrics of all batches, with the same bits as in one process that gets them in order.

    Counts are whole numbers, whose sum does not depend on order. The sums of batches are added in the order of their
    numbers.
    """
    metrics = Metrics() if into is None else into
    numbers = np.concatenate([part[0] for part in parts])
    wrong = np.concatenate([part[3] for part in parts]).reshape(-1, 3)
    every = np.sort(np.concatenate([numbers, wrong[:, 0]]))
    if len(every) and (every != every[0] + np.arange(len(every))).any():
        raise ValueError(
            f"{len(every)} batches between {every[0]} and {every[-1]} were counted: some are missing, or were counted twice"
        )
    if len(wrong):
        _, found, of = min(wrong.tolist())
        raise NotFinite(found, of)
    counts = np.concatenate([part[1] for part in parts]).reshape(-1, 2).tolist()
    sums = np.concatenate([part[2] for part in parts]).reshape(-1, 2).tolist()
    for i in np.argsort(numbers).tolist():
        metrics.loss.add(MetricSums(*counts[i], *sums[i]))
    for part in parts:
        metrics.auc.add(part[4], part[5].reshape(2, -1))
    return metrics
