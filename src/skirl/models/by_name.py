"""The models by their names in flags."""

from skirl.models.base import Model
from skirl.models.dcat import DCAT
from skirl.models.dcnv2 import DCNv2
from skirl.models.deep_cross import DeepCross
from skirl.models.deepfm import DeepFM
from skirl.models.din import DIN
from skirl.models.dlrm import DLRM
from skirl.models.wide_deep import WideDeep

MODELS: dict[str, type[Model]] = {
    "dlrm": DLRM,
    "wide-deep": WideDeep,
    "deep-cross": DeepCross,
    "deepfm": DeepFM,
    "dcnv2": DCNv2,
    "din": DIN,
    "dcat": DCAT,
}
"""The class of each model by its name in `--model`; `NAME-tiny` stands for its `tiny`."""
