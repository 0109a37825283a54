"""The names of row optimizers as flags and files write them; apart, since flags are read without NumPy."""

from typing import Literal

OptimizerName = Literal["rowwise-adagrad", "sgd", "sgd-momentum", "adagrad", "adam", "ftrl"]
