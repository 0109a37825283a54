"""A lookahead whose stages call a test's own function before each thing they do."""

from typing import Any

import skirl
from skirl.pipeline.stages import StageHook


def hooked(hook: StageHook | None, *args: Any, **options: Any) -> skirl.Lookahead:
    """`skirl.lookahead` with the seam that its signature does not show."""
    ahead = skirl.lookahead(*args, **options)
    ahead.hook = hook
    return ahead
