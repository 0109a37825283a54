"""A launcher that waits for others when its own trainers are through is ended, with patience; no other one is."""

import os
import signal
import subprocess
import sys

import pytest

TRAINER = "from skirl.peers.processes import watch_launcher; watch_launcher({patience}, 0.1)"
WATCHES = {"TORCHELASTIC_RUN_ID": "job", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "0"}


def launched(then: str, patience: float = 0.2, **changes: str) -> subprocess.CompletedProcess[str]:
    """A shell as launcher: it has a trainer that ends, and does something then."""
    trainer = f"{sys.executable} -c '{TRAINER.format(patience=patience)}'"
    return subprocess.run(
        ["sh", "-c", f"{trainer}; {then}"],
        env=os.environ | WATCHES | changes,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_a_launcher_that_waits_for_others_is_ended_and_it_is_said():
    done = launched("exec sleep 30")
    assert done.returncode == -signal.SIGKILL
    assert "the launcher waits for others, for more than 0.2 s: it is ended; start it again" in done.stderr


@pytest.mark.parametrize(
    ("then", "changes"),
    [
        ("sleep 0.7; true", {}),  # it has begun again
        ("exec sleep 0.7", {"GROUP_WORLD_SIZE": "1"}),
        ("exec sleep 0.7", {"LOCAL_RANK": "1"}),
    ],
)
def test_one_that_has_trainers_again_or_is_alone_goes_on(then, changes):
    done = launched(then, **changes)
    assert (done.returncode, done.stderr) == (0, "")


def test_one_that_ends_in_time_is_let_be():
    assert launched("exec true", patience=5).returncode == 0
