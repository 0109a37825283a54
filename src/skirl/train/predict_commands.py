"""`skirl evaluate` and `skirl predict`. The code that does the work is imported when they run."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from skirl.train.chosen import Chosen


@dataclass(frozen=True)
class Evaluate(Chosen):
    """Compare the predictions of a trained model with labels."""

    def run(self) -> dict[str, Any]:
        """Predict, compare with the labels, and return the result."""
        from skirl.train.predict import evaluate

        return evaluate(self)


@dataclass(frozen=True)
class Predict(Chosen):
    """Write the predictions of a trained model to a Parquet file."""

    _: KW_ONLY
    into: Path
    """The file to write; an existing one is replaced when the new one is complete."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.into.suffix not in (".parquet", ".pq"):
            raise ValueError(f"--into is {self.into}: name a file that ends with .parquet")
        if not self.into.absolute().parent.is_dir():
            raise ValueError(f"--into is {self.into}: its folder does not exist, make it first")

    def run(self) -> dict[str, Any]:
        """Predict, write the file, and return the result."""
        from skirl.train.predict import predict

        return predict(self, self.into)
