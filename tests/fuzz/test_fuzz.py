"""Every parser and loader under mutated input, for seconds in total, or for an hour in `make campaign`.

Each target runs in its own process: a crash in native code, a hang or an allocation beyond the limit ends that process,
and the input that caused it is on disk. The time is shared evenly; a campaign's report tells how many cases that gave.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import loop
from tests.fuzz.targets import TARGETS
from tests.warm import MODULE, Python

FINDINGS = Path(__file__).parents[2] / "fuzz-findings"
SHORT, LONG = 4.0, 3600.0


@pytest.mark.timeout(0)
@pytest.mark.parametrize("target", TARGETS)
def test_a_clean_error_or_a_right_result(
    python: Python,
    target: str,
    tmp_path: Path,
    campaign_seed: int,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, Any], None],
) -> None:
    campaign = pytestconfig.getoption("--hypothesis-profile") == "campaign"
    seconds = (pytestconfig.getoption("--fuzz-seconds") or (LONG if campaign else SHORT)) / len(TARGETS)
    flags = {"seed": campaign_seed, "seconds": seconds, "scratch": tmp_path, "findings": FINDINGS}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    done = python.run(MODULE, "tests.fuzz", target, *words, timeout=seconds + 600)
    if done.returncode not in (0, 1) or not done.stdout.endswith("}\n"):
        for now in tmp_path.glob("*/now"):
            kept = Path(shutil.copytree(f"{now.read_text()}.kept", FINDINGS / Path(now.read_text()).name))
            pytest.fail(f"the process ended in {kept}, again: --input {kept}\n{done.stderr[-5000:]}")
        pytest.fail(f"the process ended before any case\n{done.stderr[-5000:]}")
    counts = json.loads(done.stdout.splitlines()[-1])
    for name in ("cases", loop.READ, loop.REFUSED):
        record_property(name, counts[name])
    assert not done.returncode, done.stdout
    assert counts["cases"] >= loop.WARM and counts[loop.READ] + counts[loop.REFUSED] == counts["cases"]
