"""A run that starts from another run's rows, is killed before its first checkpoint, and is resumed with --resume."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import skirl.train.fine_tuning as taking
from skirl.checkpoint import numbers
from skirl.train.commands import Train
from skirl.train.resume import NAME
from tests.habits.test_resume import losses_of as losses_and_result

SMALL: dict[str, Any] = {
    "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 32, "steps": 6, "cache": "300", "threads": 1,
    "quiet": True, "run": "none",
}  # fmt: skip
TUNED: dict[str, Any] = {**SMALL, "seed": 3, "lr": 0.3}


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def base_and_losses(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Return a run's checkpoints, and the losses of an undisturbed run that starts from its rows."""
    saved = tmp_path_factory.mktemp("base") / "saved"
    Train.of(**SMALL, save=saved).run()
    with pytest.MonkeyPatch.context() as patch:
        return saved, losses_of(patch, from_=saved)[0]


@pytest.fixture
def base(base_and_losses: tuple[Path, list[float]], tmp_path: Path) -> Path:
    """Return a private copy of the checkpoints."""
    return Path(shutil.copytree(base_and_losses[0], tmp_path / "base"))


@pytest.fixture
def expected(base_and_losses: tuple[Path, list[float]]) -> list[float]:
    return base_and_losses[1]


def losses_of(patch: pytest.MonkeyPatch, **flags: Any) -> tuple[list[float], dict[str, Any]]:
    return losses_and_result(patch, Train.of(**{**TUNED, **flags}))


def killed(**flags: Any) -> None:
    """Raise in place of taking rows, as if the run were killed there."""

    def kill(*args: Any) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(taking, "copy_rows", kill)
        Train.of(**{**TUNED, **flags}).run()
    assert not numbers(flags["save"])


def test_resume_alone_begins_with_the_rows_that_the_killed_run_began_with(
    base, expected, tmp_path, monkeypatch, caplog
):
    tuned = tmp_path / "tuned"
    killed(from_=base, save=tuned)
    Train.of(
        **{**SMALL, "steps": 8}, save=base, resume=True
    ).run()  # the other run has moved on: its newest checkpoint is another one now
    found, result = losses_of(monkeypatch, save=tuned, resume=True)
    assert found == expected and result["from"]["rows"] > 0 and result["from"]["folder"] == str(base)
    assert f"{tuned} holds no checkpoint: the run begins again, from {base / 'checkpoint-000002.json'}" in caplog.text
    more, result = losses_of(monkeypatch, save=tuned, resume=True, steps=8)
    assert len(more) == 2 and result["begun_at"] == 6 and result["from"] is None


def test_from_beside_resume_begins_from_there_once(base, expected, tmp_path, monkeypatch):
    flags = {"from_": base, "save": tmp_path / "tuned", "resume": True}
    killed(**flags)
    assert losses_of(monkeypatch, **flags)[0] == expected
    shutil.rmtree(base)  # nobody needs it any more
    assert losses_of(monkeypatch, **flags, steps=7)[1]["begun_at"] == 6


def test_what_was_damaged_when_the_run_began_is_not_what_it_begins_from_again(base, tmp_path, monkeypatch):
    newest = max((base / "rows").glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    killed(from_=base, save=tmp_path / "tuned")
    assert '/checkpoint-000001.json"' in (tmp_path / "tuned" / NAME).read_text()
    plain = losses_of(monkeypatch, from_=base)[0]
    assert losses_of(monkeypatch, save=tmp_path / "tuned", resume=True)[0] == plain


def test_another_checkpoint_than_the_run_began_from_is_refused(base, expected, tmp_path, monkeypatch):
    tuned, other, moved = (tmp_path / name for name in ("tuned", "other", "moved"))
    Train.of(**{**SMALL, "steps": 2}, save=other).run()
    killed(from_=base, save=tuned)
    header = base / "checkpoint-000002.json"
    again = {**TUNED, "save": tuned, "resume": True}
    with pytest.raises(
        ValueError, match=f"--from is {other}, and the run in {tuned} began from {header}: leave --from"
    ):
        Train.of(**again, from_=other).run()
    base.rename(moved)
    with pytest.raises(ValueError, match=f"the run in {tuned} began from {header}, which is gone or has been replaced"):
        Train.of(**again).run()
    assert losses_of(monkeypatch, save=tuned, resume=True, from_=moved)[0] == expected
    with pytest.raises(ValueError, match=f"--from is {other}, and the run in {tuned} began from {moved / header.name}"):
        Train.of(**again, from_=other).run()
    with pytest.raises(ValueError, match=f"--from is {moved}, and the run in {other} began from no other run"):
        Train.of(**{**SMALL, "steps": 3}, save=other, from_=moved, resume=True).run()
