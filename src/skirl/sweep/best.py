"""The best checkpoint of each variant, kept in the folder `best` beside its others, as `skirl train` does."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skirl.checkpoint import best
from skirl.checkpoint.keeper import refuse_checkpoints
from skirl.sweep.judged import Judged
from skirl.tools.os_errors import why

log = logging.getLogger("skirl")


class Bests:
    """Keeps the best checkpoints of a sweep's variants.

    **Arguments**

    - `save`: the folder of the sweep's checkpoints; None: keep none.
    - `names`: the variants.
    - `resume`: whether the folder may hold some already.
    """

    def __init__(self, save: Path | None, names: Sequence[str], *, resume: bool) -> None:
        self._save = save
        self._at: dict[str, int] = {}
        """By variant: the step of the checkpoint that is kept."""
        self._missed: dict[str, str] = {}
        """By variant: why its best is not."""
        for name in [] if save is None else names:
            if not resume:
                refuse_checkpoints(self._folder(name))
            elif (there := best.headers_with_steps(self._folder(name))) != []:
                self._at[name] = there[0][0]

    @property
    def on(self) -> bool:
        """Whether any are kept."""
        return self._save is not None

    def go_on(self, header: Mapping[str, Any], judged: Mapping[str, Judged]) -> None:
        """Keep what a kill has left undone: the sweep's checkpoint is there, and the best of its step is not kept yet.

        **Arguments**

        - `header`: the checkpoint that the sweep resumes from.
        - `judged`: the evaluations up to there.
        """
        due = [n for n, one in judged.items() if n in header["variants"] and one.is_best and one.step == header["step"]]
        self.keep([name for name in due if self._at.get(name) != header["step"]], header["variants"], header["step"])

    def keep(self, names: Sequence[str], saved: Mapping[str, str], step: int) -> None:
        """Keep checkpoints that are on disk.

        **Arguments**

        - `names`: the variants that were never better.
        - `saved`: by variant: the name of its checkpoint's header.
        - `step`: its step.
        """
        for name in names if self._save is not None else ():
            try:
                best.keep(self._folder(name).parent / saved[name])
            except (OSError, ValueError) as error:
                self.miss([name], step, f"it could not be kept: {why(error, self._folder(name))}")
            else:
                self._at[name] = step
                self._missed.pop(name, None)

    def miss(self, names: Sequence[str], step: int, why_not: str) -> None:
        """Take note, and warn, that checkpoints which should be kept cannot be.

        **Arguments**

        - `names`: their variants.
        - `step`: their step.
        - `why_not`: the reason.
        """
        for name in names if self._save is not None else ():
            still = f"that of step {self._at[name]:,} stays" if name in self._at else "none is kept yet"
            self._missed[name] = (
                f"step {step:,} of variant {name} is the best so far, but {why_not}; {still} in {self._folder(name)}"
            )
            log.warning("%s", self._missed[name])

    def of(self, name: str, judged: Judged | None) -> dict[str, Any] | None:
        """Return where a variant's best checkpoint is: folder, step, held-out log loss. None if none is kept.

        **Arguments**

        - `name`: the variant.
        - `judged`: its evaluations.
        """
        if name not in self._at:
            return None
        loss = judged.best if judged is not None and judged.best_step == self._at[name] else None
        return {"folder": str(self._folder(name)), "step": self._at[name], "test_logloss": loss}

    @property
    def missed(self) -> str | None:
        """The variants whose best is not kept, a sentence for each; None if all are."""
        return "\n".join(self._missed.values()) or None

    def _folder(self, name: str) -> Path:
        assert self._save is not None
        return self._save / name / best.NAME
