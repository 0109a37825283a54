"""The commands that train and check a run, and everything around the training loop."""

from typing import TYPE_CHECKING

from skirl.tools import lazily

if TYPE_CHECKING:
    from skirl.train.recipe import Recipe

__all__ = ["Recipe"]

__getattr__ = lazily(__name__)
