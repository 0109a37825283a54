"""Ids of any kind to rows of their own."""
