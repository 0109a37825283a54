"""`--shards`: the samples of a step are the same for any number of shards, and its bits are those of the plain reference."""

import pytest

from skirl.train.commands import Train, Verify

TINY = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 32, "quiet": True}


@pytest.mark.parametrize("optimizer", ["adam", "rowwise-adagrad"])
def test_verify(optimizer):
    result = Verify.of(**TINY, steps=6, cache="touched:25%", shards=4, optimizer=optimizer).run()
    assert result["runs"][0]["losses"] == 6 and result["failed"] is None


def test_train_goes_on_with_its_shards(tmp_path):
    """It has the bits of a run that never stopped. Another number of shards is refused before anything is read."""
    run = {**TINY, "run": "none", "shards": 2, "cache": "touched:50%"}
    whole = Train.of(**run, steps=6).run()
    first = Train.of(**run, steps=3, save=tmp_path).run()
    assert (first["steps"], first["checkpoints"]["newest"], first["failed"]) == (3, 3, None)
    then = Train.of(**run, steps=6, save=tmp_path, resume=True).run()
    assert then["loss"]["digest"] == whole["loss"]["digest"] and then["checkpoints"]["newest"] == 6
    assert whole["samples"] == 6 * 32
    with pytest.raises(ValueError, match="--shards is 4, the run was saved with 2"):
        Train.of(**(run | {"shards": 4}), steps=8, save=tmp_path, resume=True).run()
