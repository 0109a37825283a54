"""Plant a fault in a function: other text in its code, as `ast.unparse` writes it, whatever its layout and comments."""

import ast
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """One planted fault: `new` in place of `old`, which must occur exactly once.

    `where` is a module of skirl and a function or class in it, "oracle.bank:BankPlanner.plan". `old` are whole tokens,
    with single quotes and without comments; how its lines are indented does not matter, but those of `new` go by it.
    """

    name: str
    where: str
    old: str
    new: str

    @property
    def module(self) -> str:
        return self.where.partition(":")[0]

    def plant(self, source: str) -> ast.Module:
        """Return the module's parsed source with the fault in it. Raise LookupError unless `old` occurs exactly once."""
        tree: Any = ast.parse(source)
        block, node = [], tree
        for name in self.where.partition(":")[2].split("."):
            block = node.body
            node = self._one([child for child in block if getattr(child, "name", None) == name], name)
        text = ast.unparse(node)
        match = self._one([*re.finditer(self._pattern(), text)], self.old)
        line = text[text.rfind("\n", 0, match.start()) + 1 :]
        indent = len(line) - len(line.lstrip()) - (len(self.old) - len(self.old.lstrip()))
        new = self.new.strip().replace("\n", "\n" + " " * indent)
        [planted] = ast.parse(text[: match.start()] + new + text[match.end() :]).body
        block[block.index(node)] = ast.increment_lineno(planted, node.lineno - planted.lineno)
        return tree

    def _one(self, found: list[Any], what: str) -> Any:
        if len(found) != 1:
            raise LookupError(f"{what!r} stands {len(found)} times in {self.where}: write this fault anew")
        return found[0]

    def _pattern(self) -> str:
        old = self.old.strip()
        lines = r"\n *".join(re.escape(line.strip()) for line in old.splitlines())
        before, after = (r"(?<![\w.])" if re.match(r"\w", old) else ""), (r"(?!\w)" if re.search(r"\w$", old) else "")
        return before + lines + after
