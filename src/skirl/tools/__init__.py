"""Helpers that know nothing of recommendation models."""
