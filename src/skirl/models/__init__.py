"""Recommendation models over any embeddings module."""

from skirl.models.base import Embeddings, Model
from skirl.models.dcnv2 import DCNv2
from skirl.models.deep_cross import DeepCross
from skirl.models.deepfm import DeepFM
from skirl.models.din import DIN
from skirl.models.dlrm import DLRM
from skirl.models.wide_deep import WideDeep

__all__ = ["DIN", "DLRM", "DCNv2", "DeepCross", "DeepFM", "Embeddings", "Model", "WideDeep"]
