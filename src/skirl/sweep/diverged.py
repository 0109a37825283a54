"""The end of a sweep of which no variant is left."""


class Diverged(ArithmeticError):
    """No variant of a sweep is left, because the losses of all became infinite or nan."""

    @classmethod
    def all_of(cls, count: int, last: str, step: int, loss: float | None) -> "Diverged":
        """Return the error for a whole sweep.

        **Arguments**

        - `count`: number of variants at the start.
        - `last`: the variant that diverged last.
        - `step`: the step of that.
        - `loss`: its loss in that step.
        """
        return cls(
            f"all {count} variants have diverged, the last one ({last!r}) in step {step}, where its loss is {loss}: try "
            "smaller learning rates"
        )
