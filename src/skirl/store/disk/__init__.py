"""Stores that keep their rows in a folder on disk."""
