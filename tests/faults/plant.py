"""Plant a fault in a module's source. Code to replace is found as parsed Python: layout and comments do not matter."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from textwrap import dedent
from typing import Any

DOTTED = ("body", "orelse", "finalbody", "args")
"""Lists of an AST in which `...` stands for any number of nodes. Elsewhere it is literal, as in `array[..., 0]`."""


@dataclass(frozen=True)
class Fault:
    """One planted fault: `new` in place of `old`, which must occur exactly once.

    `where` is a module of skirl and a function or class in it, "oracle.bank:BankPlanner.plan". The end of a dotted name
    is enough if no other one ends like that, and "oracle.bank:" is the whole module. `old` and `new` are then Python,
    an expression or statements, and `old` matches any code that parses alike. `...` as a statement or as an argument
    stands for any number of them; the first `...` of `new` is what the first of `old` matched, and so on. An empty
    `new` removes statements.

    Without a colon, `where` is a module and `old` is a piece of its text.

    `by` names a check that catches it, to run first where others would take seconds before it.
    """

    name: str
    where: str
    old: str
    new: str
    by: str = ""

    @property
    def module(self) -> str:
        return self.where.partition(":")[0]

    def plant(self, source: str) -> ast.Module:
        """Return the module's parsed source with the fault in it. Raise LookupError unless `old` occurs exactly once."""
        _, colon, inside = self.where.partition(":")
        if not colon:
            self._once(source.count(self.old))
            return ast.parse(source.replace(self.old, self.new))
        tree = ast.parse(source)
        places = list(_places(_named(tree, inside) if inside else tree, self.old, self.new))
        self._once(len(places))
        node, put, new = places[0]
        for part in (part for root in new for part in ast.walk(root)):
            if hasattr(part, "lineno"):
                ast.copy_location(part, node)
        put(new)
        return tree

    def _once(self, found: int) -> None:
        if found != 1:
            raise LookupError(f"{self.old!r} stands {found} times in {self.where}: write this fault anew")


def _named(tree: ast.Module, name: str) -> ast.AST:
    """Return the one function or class whose dotted name ends with this one."""
    found = [node for dotted, node in _definitions(tree, "") if f".{dotted}".endswith(f".{name}")]
    if len(found) != 1:
        raise LookupError(f"{len(found)} functions or classes are called {name}: write this fault anew")
    return found[0]


def _definitions(node: ast.AST, above: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue  # expressions define nothing
        dotted = above
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            dotted = f"{above}.{child.name}".lstrip(".")
            yield dotted, child
        yield from _definitions(child, dotted)


Place = tuple[ast.AST, Callable[[list[Any]], None], list[list[Any]]]
"""A node that matches, how to replace it, and what each `...` matched."""


def _places(root: ast.AST, old: str, new: str) -> Iterator[tuple[ast.AST, Callable[[list[Any]], None], list[Any]]]:
    """Yield where `old` occurs under `root`: the node, how to replace it, and its replacement."""
    if _is_expression(old) and _is_expression(new):
        for node, put, stood in _expressions(root, _expression(old)):
            yield node, put, _filled([_expression(new)], stood)
    else:
        for node, put, stood in _statements(root, ast.parse(dedent(old)).body):
            yield node, put, _filled(ast.parse(dedent(new)).body, stood)


def _expressions(root: ast.AST, old: ast.expr) -> Iterator[Place]:
    for parent in ast.walk(root):
        for field, value in ast.iter_fields(parent):
            for i, node in enumerate(value if isinstance(value, list) else [value]):
                stood: list[list[Any]] = []
                if isinstance(node, ast.expr) and _matches(old, node, stood):

                    def put(new, parent=parent, field=field, value=value, i=i, node=node) -> None:
                        if hasattr(node, "ctx"):  # a name that is assigned, not read
                            new[0].ctx = node.ctx
                        if isinstance(value, list):
                            value[i] = new[0]
                        else:
                            setattr(parent, field, new[0])

                    yield node, put, stood


def _statements(root: ast.AST, old: list[ast.stmt]) -> Iterator[Place]:
    blocks = (value for node in ast.walk(root) for _, value in ast.iter_fields(node) if isinstance(value, list))
    for block in blocks:
        for at in range(len(block) - len(old) + 1):
            stood: list[list[Any]] = []
            run = slice(at, at + len(old))
            if all(_matches(pattern, node, stood) for pattern, node in zip(old, block[run])):

                def put(new, block=block, run=run, node=block[at]) -> None:
                    block[run] = new
                    if not block:
                        block.append(ast.copy_location(ast.Pass(), node))

                yield block[at], put, stood


def _matches(pattern: Any, node: Any, stood: list[list[Any]], field: str = "") -> bool:
    """Return whether a node has the pattern's form, and fill `stood`. Ignores whether a name is assigned or read."""
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, list):
        return _list_matches(pattern, node, stood, field)
    if not isinstance(pattern, ast.AST):
        return pattern == node
    return all(
        _matches(getattr(pattern, field, None), getattr(node, field, None), stood, field)
        for field in pattern._fields
        if field != "ctx"
    )


def _list_matches(pattern: list[Any], nodes: list[Any], stood: list[list[Any]], field: str) -> bool:
    if not pattern:
        return not nodes
    if not _is_dots(pattern[0], field):
        first = bool(nodes) and _matches(pattern[0], nodes[0], stood)
        return first and _list_matches(pattern[1:], nodes[1:], stood, field)
    for n in range(len(nodes) + 1):  # `...` matches as few as possible
        tried = [*stood, nodes[:n]]
        if _list_matches(pattern[1:], nodes[n:], tried, field):
            stood[:] = tried
            return True
    return False


def _filled(new: list[Any], stood: list[list[Any]]) -> list[Any]:
    """Return the nodes with each `...` replaced by what it matched."""
    rest = iter(stood)

    def fill(node: ast.AST) -> None:
        for field, value in ast.iter_fields(node):
            parts: list[Any] = []
            for part in value if isinstance(value, list) else [value]:
                if _is_dots(part, field):
                    parts += next(rest, [part])
                    continue
                if isinstance(part, ast.AST):
                    fill(part)
                parts.append(part)
            if isinstance(value, list):
                value[:] = parts

    for node in new:
        fill(node)
    return new


def _is_dots(node: Any, field: str) -> bool:
    value = node.value if isinstance(node, ast.Expr) else node
    return field in DOTTED and isinstance(value, ast.Constant) and value.value is ...


def _is_expression(text: str) -> bool:
    try:
        _expression(text)
    except SyntaxError:
        return False
    return True


def _expression(text: str) -> ast.expr:
    return ast.parse(dedent(text).strip(), mode="eval").body
