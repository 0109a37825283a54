"""`skirl verify` with variants: without --vary it verifies one model, with it several that train together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from skirl.sweep.variants import Varied, variants_of
from skirl.tools.progress import clock
from skirl.train.commands import Verify


@dataclass(frozen=True)
class VerifyVariants(Verify):
    """Train with a cache, with every row resident, and in plain Python; compare every bit.

    >>> flags = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 8, "steps": 4, "cache": "touched:60%"}
    >>> found = VerifyVariants.of(**flags, quiet=True, vary=("lr=0.01,0.02",)).run()
    >>> found["variants"], found["differences"]
    (['lr=0.01', 'lr=0.02'], 0)
    """

    repeated: ClassVar[tuple[str, ...]] = ("vary",)

    vary: tuple[str, ...] = ()
    """A flag and its values, such as lr=0.01,0.02: train all variants in one sweep, and each one alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.vary:
            return
        if self.optimizer == "all":
            raise ValueError(
                "optimizer is 'all', which does not go with vary: list the optimizers there, as --vary optimizer=sgd,adam"
            )
        if self.trainers is not None:
            raise ValueError(f"trainers is {self.trainers!r} and vary is given: set one of the two")
        if self.recipe.step.shards > 1:
            raise ValueError(
                f"shards is {self.recipe.step.shards}, but a sweep's steps have one shard: leave shards out"
            )
        self.made()

    def made(self) -> list[Varied]:
        """Return the variants."""
        return variants_of(self.recipes()[0], self.vary)

    def run(self) -> dict[str, Any]:
        """Train, compare and return the result."""
        if not self.vary:
            return super().run()
        from skirl.sweep.verify import verify_variants
        from skirl.tools.machine import machine

        found = verify_variants(self.recipes()[0], self.made())
        said = None if found["first"] is None else f"{found['differences']} runs differ: {found['first']}"
        return {"command": "verify", **self.flat(), **found, "machine": machine(), "failed": said}

    def summary(self, result: Mapping[str, Any]) -> dict[str, str]:
        """Return the result as lines of text, by title."""
        if not self.vary:
            return super().summary(dict(result))
        beside = f"{result['runs']:,} runs of {result['steps']:,} steps side by side"
        return {
            "differences": f"{result['differences']:,}",
            f"{len(result['variants'])} variants": f"{beside}, {result['fetched']:,} rows fetched again; each variant as "
            f"in its lone run and in plain Python ({clock(result['seconds'])})",
        }
