"""The door to TorchRec: `skirl.torchrec.swap` puts skirl in the place of a TorchRec collection."""

from skirl.nn.torchrec import swap

__all__ = ["swap"]
