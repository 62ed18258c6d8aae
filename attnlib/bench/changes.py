"""Kernels that are written as changes: cells that define some functions of a kernel anew.

A chapter that takes many small steps writes its kernel once, in the cell tagged `kernel`, and each step in a
cell tagged `change`, which has the functions, classes and constants that the step replaces or adds. The text
of a step's kernel is put together here: it is complete, so that it can be imported, compiled and compared.
"""

import ast
import functools
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

ENTRY = "attention"
"""The function of a kernel that is called; what it does not reach is left out."""


class Part(NamedTuple):
    """A statement at the top level of a kernel's text, with the comments above it."""

    names: tuple[str, ...]
    """That it binds."""
    text: str
    uses: frozenset[str]
    is_import: bool


@functools.lru_cache(maxsize=512)  # a chapter's last kernel is made of all before it, again and again
def changed(text: str, change: str) -> str:
    """`text` with the definitions of `change` in the place of those that bind the same names, new ones before
    the first of them, imports added, and without what `attention` does not reach any more.

    ValueError if `change` has anything but definitions and imports, or replaces nothing."""
    old, new = parts(text), parts(change)
    given = {part.names: part for part in new if not part.is_import}
    known = {part.names for part in old}
    if not given.keys() & known:
        names = ", ".join(name for names in given for name in names) or "none"
        raise ValueError(f"change: expected a definition that the kernel has too, got {names}")
    added = [part for names, part in given.items() if names not in known]
    result = [part for part in (*old, *new) if part.is_import]
    for part in old:
        if part.names in given:
            result += [*added, given[part.names]]
            added = []
        elif not part.is_import:
            result.append(part)
    return joined(reached(result))


def parts(text: str) -> list[Part]:
    """The statements at the top level."""
    found, lines, end = [], text.splitlines(), 0
    for node in ast.parse(text).body:
        source = "\n".join(lines[end : node.end_lineno]).strip("\n")
        end = node.end_lineno
        uses = frozenset(name.id for name in ast.walk(node) if isinstance(name, ast.Name))
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        found.append(Part(_bound(node), source, uses, is_import))
    return found


def _bound(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return tuple((alias.asname or alias.name).split(".")[0] for alias in node.names)
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return (node.name,)
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return tuple(name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name))
    what = ast.unparse(node).splitlines()[0]
    raise ValueError(f"kernel: expected definitions and imports at the top level, got {what!r}")


def reached(found: list[Part]) -> list[Part]:
    """Those that `attention` needs, in their order, each once."""
    owners = {name: part for part in found for name in part.names}
    needed, open_ = set(), [ENTRY]
    while open_:
        part = owners.get(open_.pop())
        if part is not None and part not in needed:
            needed.add(part)
            open_ += part.uses
    return [part for part in dict.fromkeys(found) if part in needed]


def joined(found: list[Part]) -> str:
    """One text: imports, then definitions, two empty lines around functions and classes."""
    text, before = "", None
    for part in found:
        simple = not re.match(r"@|def |class ", part.text) and "\n@" not in part.text
        close = before is not None and simple and before[0] and part.is_import == before[1]
        text += ("" if before is None else "\n" if close else "\n\n" if simple and before[1] else "\n\n\n")
        text += part.text
        before = simple, part.is_import
    return text + "\n"


def plain(text: str) -> str:
    """`text` of functions without comments and docstrings, in one format: what two kernels do can be
    compared."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.unparse(tree)


def folded(text: str, function: str, constants: Mapping[str, object], dropped: Collection[str]) -> str:
    """One function of `text` as it is for some constants, such as {"plan.fp8": False}: without the branches
    that it does not take, the constants that it sets itself, and calls of `dropped`."""
    found = [node for node in ast.parse(text).body if getattr(node, "name", None) == function]
    if not found:
        raise ValueError(f"function: expected one that the text has, got {function!r}")
    return ast.unparse(ast.fix_missing_locations(_Folding(constants, dropped).visit(found[0])))


class _Folding(ast.NodeTransformer):
    def __init__(self, constants: Mapping[str, object], dropped: Collection[str]) -> None:
        self.constants, self.dropped = constants, dropped

    def visit(self, node: ast.AST):
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in self.constants:
            return ast.Constant(self.constants[ast.unparse(node)])
        return super().visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp):
        self.generic_visit(node)
        known = isinstance(node.op, ast.Not) and isinstance(node.operand, ast.Constant)
        return ast.Constant(not node.operand.value) if known else node

    def visit_BoolOp(self, node: ast.BoolOp):
        self.generic_visit(node)
        decides = isinstance(node.op, ast.Or)
        left = [x for x in node.values if not isinstance(x, ast.Constant) or bool(x.value) == decides]
        if any(isinstance(x, ast.Constant) for x in left) or not left:
            return ast.Constant(decides if left else not decides)
        return left[0] if len(left) == 1 else ast.BoolOp(node.op, left)

    def visit_If(self, node: ast.If):
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant):
            return node.body if node.test.value else node.orelse
        return node if node.body else None

    def visit_Expr(self, node: ast.Expr):
        call = node.value
        is_dropped = isinstance(call, ast.Call) and ast.unparse(call.func) in self.dropped
        return None if is_dropped or isinstance(call, ast.Constant) else node

    def visit_AnnAssign(self, node: ast.AnnAssign):
        return None if ast.unparse(node.target) in self.constants else self.generic_visit(node)
