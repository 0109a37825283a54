"""Every target by its name."""

from tests.fuzz import arrays, rows, states, tables, texts
from tests.fuzz.loop import Target

TARGETS: dict[str, Target] = {
    target.name: target for target in [*texts.TARGETS, *tables.TARGETS, *states.TARGETS, *rows.TARGETS, *arrays.TARGETS]
}
