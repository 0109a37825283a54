"""The models by their names in flags."""

from importlib import import_module

from skirl.models.base import Model
from skirl.models.flags import CLASSES

MODELS: dict[str, type[Model]] = {
    name: getattr(import_module(f"skirl.models.{module}"), kind) for name, (module, kind) in CLASSES.items()
}
