"""Eviction policies, which decide which rows leave the cache."""
