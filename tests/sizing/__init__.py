"""Sizing, against counting in dictionaries and clocks that tick."""
