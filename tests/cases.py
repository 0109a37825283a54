"""How many random cases each property is tried on."""

from hypothesis import settings

CAMPAIGN_FACTOR = 20
GROWTH = 3 * CAMPAIGN_FACTOR
"""A campaign has this many times the cases of `make test`."""
FEWEST = 4
"""Properties with fewer cases than this try all of them in `make test`."""


def cases(n: int) -> settings:
    """Return settings for a number of cases: `@cases(300)` tries 100 examples in `make test`, 6,000 in `make campaign`."""
    campaign = settings.get_current_profile_name() == "campaign"
    return settings(max_examples=n * CAMPAIGN_FACTOR if campaign else max(min(n, FEWEST), n // 3))
