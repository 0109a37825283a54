"""The modules: those that look up ids, and `OncePerBag`, which runs an encoder once per distinct bag."""

from skirl.core.once import Distinct, OncePerBag

__all__ = ["Distinct", "OncePerBag"]
