"""Every target, by name."""

from tests.fuzz import rows, states, tables, texts
from tests.fuzz.loop import Target

TARGETS: dict[str, Target] = {target.name: target for part in (texts, tables, states, rows) for target in part.TARGETS}
