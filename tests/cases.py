"""How many random cases a property is tried on."""

from hypothesis import settings

CAMPAIGN_FACTOR = 20
GROWTH = 3 * CAMPAIGN_FACTOR
"""How many times the cases of `make test` a campaign has."""
FEWEST = 4
"""Properties of fewer cases have all of them in `make test`."""


def cases(n: int) -> settings:
    """`@cases(300)`: 100 examples in `make test`, 6,000 in `make campaign`."""
    campaign = settings.get_current_profile_name() == "campaign"
    return settings(max_examples=n * CAMPAIGN_FACTOR if campaign else max(min(n, FEWEST), n // 3))
