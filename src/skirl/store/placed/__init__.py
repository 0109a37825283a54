"""Rows on several stores, as a plan says."""
