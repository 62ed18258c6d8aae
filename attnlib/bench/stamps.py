"""Clock stamps in a copy of a Gluon kernel: source in, source out.

A kernel stands in one place, a notebook's cell or a module of the package, and has no measuring code.
`stamped` takes its source and returns that of a copy which writes down the SM's clock at some places. A place
is named by a piece of a statement's text: it stays right when lines move, and where a changed kernel has lost
it, an error says so.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

CLOCKS = "attnlib_clocks"  # the parameter through which a copy gets its buffer, the first of all

_STAMP = """
@gluon.jit
def attnlib_stamp({clocks}, tile, PLACE: gl.constexpr):
    clock = gl.inline_asm_elementwise(
        "mov.u32 $0, %clock;", "=r,r", [tile], dtype=gl.int32, is_pure=False, pack=1)
    kept = tile - {first}
    chosen = (gl.program_id(0) == 0) & (gl.program_id(1) == gl.num_programs(1) // 2)
    chosen = chosen & (kept >= 0) & (kept < {tiles})
    gl.store({clocks} + kept * {places} + PLACE, clock, mask=chosen)
"""


class At(NamedTuple):
    """An end of a statement of a kernel; `before` and `after` make one.

    text: a piece of its source that no other statement of the function has. function: the `@gluon.jit`
    function that it is in. tile: an expression in names of that function, the number of the tile.
    """

    text: str
    function: str
    tile: str
    after: bool


def before(text: str, function: str = "consume", tile: str = "i") -> At:
    return At(text, function, tile, False)


def after(text: str, function: str = "consume", tile: str = "i") -> At:
    return At(text, function, tile, True)


class Span(NamedTuple):
    """Something that takes time. Its ends may be in different functions; they belong together where their
    tiles are the same."""

    event: str
    begin: At
    end: At


class Stamped(NamedTuple):
    """The source of a copy with stamps; the function to be launched; where the clocks of each span lie: the
    numbers of two places; how many places there are."""

    source: str
    kernel: str
    spans: tuple[tuple[str, int, int], ...]
    places: int


class _Place(NamedTuple):
    """Before statement number `index` of a list of statements."""

    function: str
    statements: int  # id() of the list
    index: int
    tile: str


def stamped(source: str, spans: Sequence[Span], tiles: range) -> Stamped:
    """A copy of a Gluon kernel in which the first program along x, the middle one along y, stores its clock.

    source: a module with the kernel. tiles: the tiles to be kept, one after the other. The copy's functions
    take a pointer before their other arguments, to int32 (roles, len(tiles), places). Spans that meet
    share a stamp. ValueError names a statement that is not there, or there twice.
    """
    if not spans or not len(tiles) or tiles.step != 1:
        what = "a span and consecutive tiles"
        raise ValueError(f"spans, tiles: expected at least {what}, got {len(spans)} spans, {tiles}")
    tree = ast.parse(source)
    jitted = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and _is_jit(node)}
    places: dict[_Place, int] = {}
    found = []
    for span in spans:
        ends = [_place(source, jitted, at) for at in (span.begin, span.end)]
        found.append((span.event, *(places.setdefault(place, len(places)) for place in ends)))
    callers = {name: {callee for callee in jitted if _uses(node, callee)} for name, node in jitted.items()}
    given = {place.function for place in places}  # functions that need the pointer
    while more := {name for name, callees in callers.items() if callees & given} - given:
        given |= more
    kernels = [name for name in given if not any(name in callees for callees in callers.values())]
    if len(kernels) != 1:
        raise ValueError(f"source: expected one kernel that reaches all spans, found {sorted(kernels)}")
    _insert(tree, jitted, places)
    for name in given:
        jitted[name].args.args.insert(0, ast.arg(CLOCKS))
        _Passing(given, len(tiles) * len(places)).visit(jitted[name])
    stamp = _STAMP.format(clocks=CLOCKS, first=tiles.start, tiles=len(tiles), places=len(places))
    last_import = max(i for i, node in enumerate(tree.body) if isinstance(node, ast.Import | ast.ImportFrom))
    tree.body[last_import + 1 : last_import + 1] = ast.parse(stamp).body
    text = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    return Stamped(text, kernels[0], tuple(found), len(places))


def _is_jit(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("gluon.jit") for decorator in node.decorator_list)


def _uses(node: ast.FunctionDef, name: str) -> bool:
    return any(isinstance(found, ast.Name) and found.id == name for found in ast.walk(node))


def _lists(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """All lists of statements below a node."""
    for inner in ast.walk(node):
        for field in ("body", "orelse"):
            statements = getattr(inner, field, None)
            if isinstance(statements, list):
                yield statements


def _place(source: str, jitted: dict[str, ast.FunctionDef], at: At) -> _Place:
    if at.function not in jitted:
        raise ValueError(
            f"spans: expected a function of the kernel ({', '.join(jitted)}), got {at.function!r}"
        )
    wanted = " ".join(at.text.split())
    places = [
        _Place(at.function, id(statements), index + at.after, at.tile)
        for statements in _lists(jitted[at.function])
        for index, statement in enumerate(statements)
        if wanted in _text(source, statement)
    ]
    if len(places) != 1:
        raise ValueError(
            f"spans: expected {at.text!r} in one statement of {at.function}, found {len(places)}"
        )
    return places[0]


def _text(source: str, statement: ast.stmt) -> str:
    """Of a loop or branch its first line."""
    if hasattr(statement, "body"):
        return ast.unparse(statement).split("\n")[0]
    return " ".join(ast.get_source_segment(source, statement).split())


def _insert(tree: ast.Module, jitted: dict[str, ast.FunctionDef], places: dict[_Place, int]) -> None:
    lists = {id(statements): statements for node in jitted.values() for statements in _lists(node)}
    # From the back, so that the numbers of the statements before stay right.
    for place, number in sorted(places.items(), key=lambda item: -item[0].index):
        call = ast.parse(f"attnlib_stamp({CLOCKS}, {place.tile}, {number})").body
        lists[place.statements][place.index : place.index] = call


class _Passing(ast.NodeTransformer):
    """Passes the pointer on to functions that need it.

    Each role of a `gl.warp_specialize` gets a part of the buffer, by its number in the list. That number is
    a constant. With the thread's own number instead, tiles are no longer the same for all threads as far as
    ptxas can tell, and a trip of chapter 11's loop has 50 instructions more.
    """

    def __init__(self, given: set[str], part: int) -> None:
        self.given, self.part = given, part

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self.given:
            node.args.insert(0, ast.Name(CLOCKS, ast.Load()))
        if ast.unparse(node.func).endswith("warp_specialize"):
            for number, role in enumerate(node.args[0].elts):
                match role:
                    case ast.Tuple(elts=[ast.Name(id=name), ast.Tuple(elts=arguments)]) if name in self.given:
                        pointer = f"{CLOCKS} + {number * self.part}"
                        arguments.insert(0, ast.parse(pointer, mode="eval").body)
        return node
