"""Recommendation models over any embeddings module."""

from skirl.models.dlrm import DLRM

__all__ = ["DLRM"]
