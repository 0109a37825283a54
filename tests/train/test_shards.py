"""`--shards`: the samples of a step are the same for every number of them, and its bits those of the plain reference."""

import numpy as np
import pytest
import torch

from skirl.core.batch import Batch, KeyedJagged
from skirl.data import Synthetic
from skirl.train.commands import Train, Verify
from skirl.train.sharded import Sharded, divided

TINY = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 32, "quiet": True}


def test_divided():
    """Each sample's ids and weights stay its own, whatever the lengths of bags."""
    rng = np.random.default_rng(0)
    lengths = torch.from_numpy(rng.integers(0, 4, 3 * 8))
    total = int(lengths.sum())
    sparse = KeyedJagged(["a", "b", "c"], torch.arange(total), lengths=lengths, weights=torch.rand(total))
    batch = Batch(torch.rand(8, 2), sparse, torch.arange(8.0))
    starts = sparse.offsets().tolist()
    of_sample = {(f, s): list(range(starts[f * 8 + s], starts[f * 8 + s + 1])) for f in range(3) for s in range(8)}
    for number, part in enumerate(divided(batch, 4)):
        assert part.labels.tolist() == [2 * number, 2 * number + 1]
        assert torch.equal(part.dense, batch.dense[2 * number : 2 * number + 2])
        ends, values = part.sparse.offsets().tolist(), part.sparse.values().tolist()
        for f in range(3):
            for s in range(2):
                ids = values[ends[f * 2 + s] : ends[f * 2 + s + 1]]
                assert ids == of_sample[f, 2 * number + s]
        assert torch.equal(part.sparse.weights_or_none(), sparse.weights_or_none()[part.sparse.values()])


class Short(Synthetic):
    """A source whose third batch is short."""

    def __iter__(self):
        for batch in super().__iter__():
            third = self.state_dict()["next"] == 3
            yield Batch(batch.dense[:3], batch.sparse, batch.labels[:3]) if third else batch


def test_a_pass(caplog):
    source = Short("tiny", batch_size=8, batches=5)
    loader = Sharded(source, 4)
    seen, states = [], []
    for part in loader:
        seen.append(part.labels)
        states.append((loader.state_dict(), loader.steps))
    assert len(seen) == 16 and "3 samples at the end of an epoch are left out" in caplog.text
    assert [steps for _, steps in states] == [None] * 12 + [4] * 4
    again = Sharded(Short("tiny", batch_size=8, batches=5), 4)
    again.check_state(states[7][0])
    again.load_state_dict(states[7][0])
    assert torch.equal(torch.cat(list(seen[8:])), torch.cat([part.labels for part in again]))


@pytest.mark.parametrize("optimizer", ["adam", "rowwise-adagrad"])
def test_verify(optimizer):
    result = Verify.of(**TINY, steps=6, cache="touched:25%", shards=4, optimizer=optimizer).run()
    assert result["runs"][0]["losses"] == 6 and result["failed"] is None


def test_train_goes_on_with_its_shards(tmp_path):
    """The bits of a run that was never ended; another number of shards is refused before anything is read."""
    run = {**TINY, "run": "none", "shards": 2, "cache": "touched:50%"}
    whole = Train.of(**run, steps=6).run()
    first = Train.of(**run, steps=3, save=tmp_path).run()
    assert (first["steps"], first["checkpoints"]["newest"], first["failed"]) == (3, 3, None)
    then = Train.of(**run, steps=6, save=tmp_path, resume=True).run()
    assert then["loss"]["digest"] == whole["loss"]["digest"] and then["checkpoints"]["newest"] == 6
    assert whole["samples"] == 6 * 32
    with pytest.raises(ValueError, match="--shards is 4, the run was saved with 2"):
        Train.of(**(run | {"shards": 4}), steps=8, save=tmp_path, resume=True).run()
