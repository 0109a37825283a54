"""Vocabularies: they give ids of any kind rows of their own."""
