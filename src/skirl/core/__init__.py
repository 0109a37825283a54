"""The basic types (tables, batches, keys, optimizers, initial values), and the reference that defines every bit."""

from typing import Literal

OptimizerName = Literal["rowwise-adagrad", "sgd", "sgd-momentum", "adagrad", "adam", "ftrl"]
"""The names of row optimizers in flags and files. They stand here, because flags are parsed without NumPy."""
