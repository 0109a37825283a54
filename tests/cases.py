"""How many random cases a property is tried on."""

from hypothesis import settings

CAMPAIGN_FACTOR = 20


def cases(n: int) -> settings:
    """`@cases(300)`: 300 examples in `make test`, 20 times as many in `make campaign`."""
    campaign = settings.get_current_profile_name() == "campaign"
    return settings(max_examples=n * CAMPAIGN_FACTOR if campaign else n)
