"""The models by their names in flags."""

from importlib import import_module

from skirl.models.base import Model
from skirl.models.flags import CLASSES


def _class(place: str) -> type[Model]:
    module, name = place.split(".")
    return getattr(import_module(f"skirl.models.{module}"), name)


MODELS: dict[str, type[Model]] = {name: _class(place) for name, place in CLASSES.items()}
