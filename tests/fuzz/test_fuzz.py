"""Every parser and loader under mutated input, for seconds in total, or for an hour in `make campaign`."""

import logging
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import rows, states, tables, texts
from tests.fuzz.mutate import Draw
from tests.fuzz.target import Target, limited

TARGETS = [target for part in (texts, tables, states, rows) for target in part.TARGETS]
SHORT, LONG = 4.0, 3600.0
WARM = 3
"""Cases that run before the time starts: they compile what the others use."""


@pytest.mark.timeout(0)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_clean_error_or_a_right_result(
    target: Target,
    tmp_path: Path,
    campaign_seed: int,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, Any], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, "skirl")
    campaign = pytestconfig.getoption("--hypothesis-profile") == "campaign"
    seconds = (pytestconfig.getoption("--fuzz-seconds") or (LONG if campaign else SHORT)) / len(TARGETS)
    only = pytestconfig.getoption("--fuzz-case")
    (tmp_path / "seeds").mkdir()
    target.prepare(tmp_path / "seeds")
    counts, end = Counter[str](), 0.0
    for number in count() if only is None else [only]:
        if number == WARM:
            end = time.monotonic() + seconds
        if only is None and number >= WARM and time.monotonic() > end:
            break
        folder = tmp_path / f"case-{number}"
        folder.mkdir()
        try:
            with limited():
                target.draw(Draw((zlib.crc32(target.name.encode()) << 64) ^ (campaign_seed << 32) ^ number), folder)
                counts[target.judge(folder)] += 1
        except Exception as error:
            error.add_note(
                f"again: pytest tests/fuzz -k {target.name} --hypothesis-seed {campaign_seed} --fuzz-case {number}"
            )
            raise
        shutil.rmtree(folder)
    for name, cases in counts.items():
        record_property(name, cases)
