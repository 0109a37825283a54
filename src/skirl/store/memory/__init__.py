"""Rows in RAM."""
