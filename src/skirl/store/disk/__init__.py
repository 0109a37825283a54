"""Rows in a folder."""
