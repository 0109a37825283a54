"""A store that spreads its rows over several stores, according to a plan."""
