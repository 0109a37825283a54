"""A lookahead whose stages call a test's own function before each action."""

from typing import Any

import skirl
from skirl.pipeline.stages import StageHook


def hooked(hook: StageHook | None, *args: Any, **options: Any) -> skirl.Lookahead:
    """Return `skirl.lookahead` with a hook that its signature does not expose."""
    ahead = skirl.lookahead(*args, **options)
    ahead.hook = hook
    return ahead
