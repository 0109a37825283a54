"""The names of row optimizers in flags and files. A module of its own, because flags are parsed without NumPy."""

from typing import Literal

OptimizerName = Literal["rowwise-adagrad", "sgd", "sgd-momentum", "adagrad", "adam", "ftrl"]
