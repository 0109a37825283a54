"""Two starts of one run write to one folder, the older one at any moment of the newer one: the newer one's files stay."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skirl.checkpoint import folder as folders
from skirl.checkpoint import numbers, saving
from skirl.checkpoint.folder import Superseded
from skirl.peers.base import PeerError, Peers
from skirl.tools import sealed_json
from tests.checkpoint.test_parts import State, Trainer, union
from tests.threads_as_trainers import InProcess


class NewerStart:
    """A newer start of the run. When first called, it loads, trains and saves twice."""

    def __init__(self, folder: Path, trainers: int) -> None:
        self.folder, self.trainers, self.ran = folder, trainers, False
        self.state = State()

    def __call__(self) -> None:
        if self.ran:
            return
        self.ran = True

        def work(peers: Peers) -> State:
            trainer = Trainer(peers, "memory").load(self.folder).train(7)
            trainer.save(self.folder)
            trainer.train(8).save(self.folder)
            return trainer.state()

        self.state = union(InProcess.run(self.trainers, work))


def before(newer: Callable[[], None], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        newer()
        return real(*args, **more)

    return call


def after(newer: Callable[[], None], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        found = real(*args, **more)
        newer()
        return found

    return call


MOMENTS = ("header", "rename", "retain", "sweep is to be allowed", "sweep was allowed")


@pytest.mark.parametrize(
    ("moment", "trainers"), [*((moment, 2) for moment in MOMENTS), (MOMENTS[1], 1), (MOMENTS[4], 1)]
)
def test_an_older_start_changes_nothing(tmp_path: Path, moment: str, trainers: int) -> None:
    newer = NewerStart(tmp_path, trainers)

    def older(peers: Peers) -> None:
        trainer = Trainer(peers, "memory").train(0)
        trainer.save(tmp_path)
        first.wait()
        if peers.rank == 0:
            patch.setattr(*points[moment])
        try:
            trainer.train(1).save(tmp_path)
        except (Superseded, PeerError, OSError) as error:
            told.append(str(error))
        if newer.ran:  # whether or not this failed, it knows from now on
            with pytest.raises(
                (Superseded, PeerError), match="belongs to a newer start of the run, and this is start 1: end"
            ):
                trainer.train(2).save(tmp_path)

    first, told = threading.Barrier(trainers), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        points = {
            "header": (saving, "write_sealed", before(newer, saving.write_sealed)),
            "rename": (sealed_json.os, "replace", _at_header(newer, sealed_json.os.replace)),
            "retain": (folders, "retain", before(newer, folders.retain)),
            "sweep is to be allowed": (folders, "is_newest", before(newer, folders.is_newest)),
            "sweep was allowed": (folders, "is_newest", after(newer, folders.is_newest)),
        }
        InProcess.run(trainers, older)
    assert newer.ran
    body = folders.read(folders.header(tmp_path, numbers(tmp_path)[-1]))
    assert body["start"] == 2
    found = InProcess.run(trainers, lambda peers: Trainer(peers, "memory").load(tmp_path).state())
    assert union(found) == newer.state


def _at_header(newer: Callable[[], None], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(old: Any, new: Any) -> Any:
        if folders.is_header(Path(new)):
            newer()
        return real(old, new)

    return call


def test_a_start_goes_on_and_a_process_that_resumes_is_another(tmp_path: Path) -> None:
    [one] = InProcess.job(1)
    trainer = Trainer(one, "memory").train(0)
    for _ in range(2):
        trainer.train(1).save(tmp_path)
        assert folders.read(folders.header(tmp_path, numbers(tmp_path)[-1]))["start"] == 1
    Trainer(one, "memory").load(tmp_path).train(1).save(tmp_path)
    assert folders.read(folders.header(tmp_path, numbers(tmp_path)[-1]))["start"] == 2
    assert [path.name for path in tmp_path.glob("start-*")] == ["start-000002"]


def test_a_listing_that_is_old_tells_nothing_of_a_newer_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems show stale listings. A folder that somebody has cleared still belongs to the start."""
    assert folders.claim(tmp_path) == 1 and folders.is_newest(tmp_path, 1)
    with monkeypatch.context() as patch:
        folders.claim(tmp_path)
        patch.setattr(folders, "_starts", lambda folder: [1])
        with pytest.raises(Superseded, match="belongs to a newer start of the run, and this is start 1"):
            folders.check_start(tmp_path, 1)
    (tmp_path / "start-000002").unlink()
    assert folders.is_newest(tmp_path, 2)
