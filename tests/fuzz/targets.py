"""Every target, by name."""

from tests.fuzz import arrays, laid, rows, states, table_plans, tables, texts
from tests.fuzz.loop import Target

TARGETS: dict[str, Target] = {
    target.name: target for part in (texts, tables, laid, states, table_plans, rows, arrays) for target in part.TARGETS
}
