"""When variants leave a race: how sure it has to be, and the rungs."""

from dataclasses import dataclass, replace

FIRST = 8
"""Least number of batches in the first stretch, in which nobody leaves for a deficit."""


@dataclass(frozen=True)
class Rules:
    """When variants leave.

    >>> Rules(keep=0)
    Traceback (most recent call last):
    ValueError: keep is 0: set it to 1 or more
    """

    alpha: float = 0.05
    """Highest probability that the best is ever dropped for a deficit that looks sure; 0: nobody leaves for a deficit."""
    keep: int = 1
    """Configurations that stay to the end, unless others than the race make them leave."""
    rungs: tuple[int, ...] = ()
    """Steps after which only half as many configurations as before may go on."""
    first: int = FIRST
    """Batches of the first stretch, in which nobody leaves for a deficit."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha is {self.alpha}: set it to a probability, 0 or more and below 1")
        for name in ("keep", "first"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: set it to 1 or more")
        if any(step < 1 for step in self.rungs) or list(self.rungs) != sorted(set(self.rungs)):
            raise ValueError(f"rungs are {', '.join(map(str, self.rungs))}: set them to steps that rise, from 1 on")

    def without_rungs(self) -> "Rules":
        """Return the same rules without rungs: variants leave only for a deficit."""
        return replace(self, rungs=())

    def going_on(self, was: "Rules", step: int) -> "Rules":
        """Return these rules for a race that ran by `was` up to a step: its stretches stay, and the rungs that it passed.

        >>> Rules(rungs=(20, 40, 80), first=20).going_on(Rules(rungs=(10, 20, 40), first=10), step=15)
        Rules(alpha=0.05, keep=1, rungs=(10, 40, 80), first=10)
        """
        passed = [rung for rung in was.rungs if rung <= step]
        coming = {max(rung, step + 1) for rung in self.rungs[len(passed) :]}
        return replace(self, rungs=(*passed, *sorted(coming)), first=was.first)

    def most(self, configurations: int, step: int) -> int:
        """Return how many configurations may go on after a step.

        >>> [Rules(rungs=(10, 20, 30), keep=2).most(9, step) for step in (9, 10, 20, 30)]
        [9, 5, 3, 2]
        """
        passed = sum(1 for rung in self.rungs if rung <= step)
        return max(self.keep, -(-configurations // 2**passed))
