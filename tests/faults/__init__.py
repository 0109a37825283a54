"""Planted faults, and the compact battery of the suite's own checks that must catch each of them."""
