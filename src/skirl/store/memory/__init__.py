"""Stores that keep their rows in memory."""
