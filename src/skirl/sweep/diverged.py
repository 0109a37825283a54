"""The end of a sweep of which no variant is left."""


class Diverged(ArithmeticError):
    """No variant of a sweep is left: the losses of all became infinite, or no numbers."""

    @classmethod
    def all_of(cls, count: int, last: str, step: int, loss: float | None) -> "Diverged":
        """Say so of a whole sweep.

        **Arguments**

        - `count`: how many variants began.
        - `last`: the variant that diverged last.
        - `step`: when it did.
        - `loss`: its loss in that step.
        """
        return cls(
            f"all {count} variants have diverged, the last one ({last!r}) in step {step}, where its loss is {loss}: try "
            "smaller learning rates"
        )
