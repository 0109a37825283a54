"""How many random cases each property is tried on, and how many of a list."""

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings

T = TypeVar("T")

CAMPAIGN_FACTOR = 20
FEWEST = 4
"""Properties with fewer cases than this try all of them in `make test`."""


def cases(n: int) -> settings:
    """Return settings for a number of cases: `@cases(320)` tries 40 examples in `make test`, 6,400 in `make campaign`."""
    campaign = settings.get_current_profile_name() == "campaign"
    return settings(max_examples=n * CAMPAIGN_FACTOR if campaign else max(min(n, FEWEST), n // 8))


def some(of: Sequence[T]) -> Sequence[T]:
    """Return all in a campaign, and every third in `make test`."""
    return of if settings.get_current_profile_name() == "campaign" else of[::3]
