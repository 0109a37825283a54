"""Recommendation models over any embeddings module."""

from typing import TYPE_CHECKING

from skirl.tools import lazily

if TYPE_CHECKING:
    from skirl.models.base import Embeddings, Model
    from skirl.models.by_name import MODELS
    from skirl.models.dcat import DCAT
    from skirl.models.dcnv2 import DCNv2, DeepCross
    from skirl.models.deepfm import DeepFM
    from skirl.models.din import DIN
    from skirl.models.dlrm import DLRM
    from skirl.models.wide_deep import WideDeep

__all__ = ["DCAT", "DIN", "DLRM", "MODELS", "DCNv2", "DeepCross", "DeepFM", "Embeddings", "Model", "WideDeep"]

__getattr__ = lazily(__name__)
