"""What a committed notebook must be: executed in order, without errors, small, stable, clean, complete.

Each rule looks at one notebook and yields (cell id, what is wrong). `check` applies them all.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from attnlib.book import claims
from attnlib.book.chapters import STEPS

MAX_BYTES = 3_300_000
MAX_CODE_CELLS = 28
MAX_CELL_LINES = 45
MAX_KERNEL_CELL_LINES = 100
MAX_KERNEL_LINES = 60
"""Of all functions of one cell that Triton compiles."""
MAX_GLUON_CELL_LINES = 175
MAX_GLUON_LINES = 140
"""The same in Gluon, where a kernel is two or three programs, and copies and waits are written out."""
MAX_PIECES_CELL_LINES = 250
"""The same for a kernel that later cells change: it has a short function for each thing that they replace."""
MAX_BACKWARD_CELL_LINES = 185
MAX_BACKWARD_LINES = 120
"""The same for a backward pass, which has three kernels, and a launcher that takes both ways."""
EXERCISES = 2
BOX = ("Prerequisites", "What changes", "Needs", "Runs for")
"""Rows of the table under a chapter's title."""
FOLDED = "hide-input"
"""Tag of a code cell whose source the HTML book folds; its output stays."""
OPEN = {"kernel", "change", "variant", "exercise"}
"""Tags of code cells that are there to be read."""
PLUMBING = re.compile(
    r"\blesson\.(?:begin|measure|measure_backward|measure_sustained|table|ladder|show_table|say|verdict)\("
    r"|\bplotting\.publish\("
)
"""What only a cell does that sets up, measures, tabulates or draws."""

VERDICTS = re.compile(r"\b(?:lesson\.verdict|verdict\.judge)\(")
"""What asks whether a difference is more than noise."""

MACHINE_PATH = re.compile(
    r"(?<![\w.:/<)-])(?:/(?:work|tmp|root|home|Users|mnt|workspace|opt|var|usr)/[\w.-]|[A-Z]:\\\\?\w|file://)"
)
"""An absolute path of somebody's machine. Fractions in prose ("work/step") and URLs are none."""


@dataclass(frozen=True)
class Problem:
    """One broken rule: notebook name, cell id ("" for the notebook as a whole), rule name, what is wrong."""

    notebook: str
    cell: str
    rule: str
    message: str

    def __str__(self) -> str:
        place = f"{self.notebook}, cell {self.cell}" if self.cell else self.notebook
        return f"{place}: {self.message} [{self.rule}]"


@dataclass(frozen=True)
class Notebook:
    """A notebook file, as `json` reads it."""

    name: str
    text: str
    content: dict

    @classmethod
    def read(cls, path: Path) -> "Notebook":
        """Read a file; ValueError if it is not JSON with a list of cells."""
        text = path.read_text(encoding="utf-8")
        try:
            content = json.loads(text)
        except RecursionError as error:
            raise ValueError(f"JSON in more levels than can be read: {error}") from None
        if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
            raise ValueError("expected a list of 'cells'")
        return cls(path.stem, text, content)

    @property
    def cells(self) -> list[dict]:
        return self.content["cells"]

    @property
    def code(self) -> list[dict]:
        """Code cells that have a source."""
        return [cell for cell in self.cells if cell["cell_type"] == "code" and source(cell).strip()]

    @property
    def number(self) -> str:
        """The two digits of the chapter."""
        return self.name[:2]


Found = Iterator[tuple[str, str]]
Rule = Callable[[Notebook], Found]


def source(cell: dict) -> str:
    """The text of a cell."""
    return "".join(cell["source"])


def tags(cell: dict) -> list[str]:
    """The tags of a cell."""
    return cell.get("metadata", {}).get("tags", [])


def _id(cell: dict) -> str:
    return cell.get("id", "?")


def _outputs(nb: Notebook) -> Iterator[tuple[dict, dict]]:
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            yield cell, output


def _texts(cell: dict) -> Iterator[str]:
    """Everything of a cell that a reader can see as text: source, streams, tracebacks, all data but encoded
    files."""
    yield source(cell)
    for output in cell.get("outputs", []):
        yield "".join(output.get("text", ""))
        yield "\n".join(output.get("traceback", []))
        for kind, data in output.get("data", {}).items():
            if kind.startswith("text/") or kind == "image/svg+xml":
                yield "".join(data)


def valid_format(nb: Notebook) -> Found:
    """nbformat 4.5, valid, for the kernel python3."""
    from nbformat.validator import iter_validate

    version = (nb.content.get("nbformat"), nb.content.get("nbformat_minor"))
    if version != (4, 5):
        yield "", f"expected nbformat 4.5, got {version[0]}.{version[1]}"
    for error in iter_validate(nb.content, version=4, version_minor=5):
        yield "", f"not a valid notebook: {str(error).splitlines()[0]}"
    kernel = nb.content.get("metadata", {}).get("kernelspec", {}).get("name")
    if kernel != "python3":
        yield "", f"expected kernelspec python3, got {kernel}"


def stable_ids(nb: Notebook) -> Found:
    """Cell ids are unique and written by hand, c<chapter>-<what it is>."""
    seen: set[str] = set()
    for cell in nb.cells:
        if not re.fullmatch(rf"c{nb.number}-[a-z0-9][a-z0-9-]*", _id(cell)):
            yield _id(cell), f"expected an id such as c{nb.number}-idea, got {_id(cell)}"
        if _id(cell) in seen:
            yield _id(cell), "id used twice"
        seen.add(_id(cell))


def execution_order(nb: Notebook) -> Found:
    """Code cells were executed once each, from top to bottom: counts 1 to n."""
    for expected, cell in enumerate(nb.code, start=1):
        if cell.get("execution_count") != expected:
            yield _id(cell), f"expected execution count {expected}, got {cell.get('execution_count')}"
            return


def no_errors(nb: Notebook) -> Found:
    """No output is an error."""
    for cell, output in _outputs(nb):
        if output["output_type"] == "error":
            yield _id(cell), f"error output {output.get('ename')}: {output.get('evalue')}"


def no_stderr(nb: Notebook) -> Found:
    """Nothing was written to stderr: no warning, no progress bar."""
    for cell, output in _outputs(nb):
        if output.get("name") == "stderr":
            line = "".join(output.get("text", "")).strip().splitlines()
            yield _id(cell), f"output on stderr: {line[0] if line else ''}"


def small(nb: Notebook) -> Found:
    """Smaller than 3.3 MB: a profile card has 0.16, a chart with a number in each of 230 cells 0.35, and
    chapter 19 has four of those."""
    size = len(nb.text.encode())
    if size >= MAX_BYTES:
        yield "", f"expected less than {MAX_BYTES:,} bytes, got {size:,}"


def no_machine_paths(nb: Notebook) -> Found:
    """No absolute path of the machine it was written or executed on."""
    for cell in nb.cells:
        for text in _texts(cell):
            found = MACHINE_PATH.search(text)
            if found:
                line = text[text.rfind("\n", 0, found.start()) + 1 :].splitlines()[0].strip()
                yield _id(cell), f"machine path in: {line[:80]}"
                break


def no_embedded_images(nb: Notebook) -> Found:
    """Text cells hold no images: neither base64 nor attachments."""
    for cell in nb.cells:
        if cell["cell_type"] == "markdown":
            if re.search(r"data:[\w/+.-]+;base64,", source(cell)):
                yield _id(cell), "base64 data in a Markdown cell"
            if cell.get("attachments"):
                yield _id(cell), "attachment in a Markdown cell"


def no_noise(nb: Notebook) -> Found:
    """No execution times and no widget state, which change with each run."""
    if "widgets" in nb.content.get("metadata", {}):
        yield "", "widget state in the metadata"
    for cell in nb.cells:
        if "execution" in cell.get("metadata", {}):
            yield _id(cell), "execution times in the metadata"


def title(nb: Notebook) -> Found:
    """The first cell is Markdown and starts with '# NN '."""
    first = nb.cells[0] if nb.cells else {"cell_type": "none", "source": ""}
    if first["cell_type"] != "markdown" or not re.match(rf"# {nb.number} \S", source(first)):
        yield _id(first), f"expected the title '# {nb.number} ...' in a first Markdown cell"


def box(nb: Notebook) -> Found:
    """The first cell has the box of a chapter: a table that says what it builds on, changes, needs, and how
    long it runs."""
    text = source(nb.cells[0]) if nb.cells else ""
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| \S", text, re.MULTILINE)
    if rows != list(BOX):
        yield (
            _id(nb.cells[0]) if nb.cells else "",
            f"expected a table with the rows {', '.join(BOX)}, got {', '.join(rows) or 'none'}",
        )


def begins(nb: Notebook) -> Found:
    """The first code cell calls lesson.begin with the name of the notebook."""
    if not nb.code or f'lesson.begin("{nb.name}")' not in source(nb.code[0]):
        yield (
            (_id(nb.code[0]) if nb.code else ""),
            f'expected lesson.begin("{nb.name}") in the first code cell',
        )


def sizes(nb: Notebook) -> Found:
    """Few code cells, besides those that change a kernel and those of exercises, and short ones."""
    apart = sum(bool({"change", "variant", "exercise"} & set(tags(cell))) or _asks(cell) for cell in nb.code)
    in_pieces = any("change" in tags(cell) for cell in nb.code)
    if len(nb.code) - apart > MAX_CODE_CELLS:
        yield "", f"expected at most {MAX_CODE_CELLS} code cells, got {len(nb.code) - apart}"
    for cell in nb.code:
        limit = MAX_KERNEL_CELL_LINES if "@triton.jit" in source(cell) else MAX_CELL_LINES
        if "@gluon.jit" in source(cell):
            limit = MAX_PIECES_CELL_LINES if in_pieces else MAX_GLUON_CELL_LINES
        limit = MAX_BACKWARD_CELL_LINES if _is_backward(cell) else limit
        lines = source(cell).count("\n") + 1
        if lines > limit:
            yield _id(cell), f"expected at most {limit} lines, got {lines}"


def _is_backward(cell: dict) -> bool:
    """Whether a cell defines the kernels of a backward pass: it joins them to autograd."""
    return "@triton.jit" in source(cell) and "torch.autograd.Function" in source(cell)


def named_figures(nb: Notebook) -> Found:
    """Every figure was published: it has a name and an alternative text."""
    for cell, output in _outputs(nb):
        drawn = {"image/svg+xml", "image/png", "image/jpeg", "application/pdf"} & set(output.get("data", {}))
        if drawn and not (output["metadata"].get("filename") and output["metadata"].get("alt")):
            yield _id(cell), "figure without name and alternative text: show it with plotting.publish"


def kernel_cell(nb: Notebook) -> Found:
    """Every step has one cell tagged `kernel`, or changes the kernel of another one: it defines `attention`
    and says the shape of each block."""
    found = [cell for cell in nb.code if "kernel" in tags(cell)]
    needed = nb.name in dict(STEPS) and not any("change" in tags(cell) for cell in nb.code)
    if len(found) > 1 or (needed and not found):
        yield "", f"expected one cell tagged 'kernel', got {len(found)}"
    for cell in found:
        text = source(cell)
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            yield _id(cell), f"kernel cell is not Python: {error.msg} in line {error.lineno}"
            continue
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        if "attention" not in [function.name for function in functions]:
            yield _id(cell), "expected a function attention(q, k, v, causal=True, sm_scale=None)"
        if "make_block_ptr" in text:
            yield _id(cell), "tl.make_block_ptr is deprecated: use pointers or tensor descriptors"
        kernels = [f for f in functions if any("jit" in ast.unparse(d) for d in f.decorator_list)]
        lines = sum(f.end_lineno - f.lineno + 1 for f in kernels)
        limit = MAX_GLUON_LINES if "@gluon.jit" in text else MAX_KERNEL_LINES
        limit = MAX_BACKWARD_LINES if _is_backward(cell) else limit
        if lines > limit:
            yield _id(cell), f"expected at most {limit} lines of kernels, got {lines}"
        for function in kernels:
            for name, line in _blocks_without_shape(function, text.splitlines()):
                yield _id(cell), f"expected a shape comment '# [...]' for block {name} in line {line}"


def _blocks_without_shape(function: ast.FunctionDef, lines: list[str]) -> Iterator[tuple[str, int]]:
    """(name, line) of the blocks b_... whose first assignment in a kernel has no comment with a shape."""
    assigned = {argument.arg for argument in function.args.args}
    nodes = sorted((n for n in ast.walk(function) if isinstance(n, ast.Assign)), key=lambda n: n.lineno)
    for node in nodes:
        names = [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
        new = [name for name in names if name.startswith("b_") and name not in assigned]
        assigned.update(names)
        statement = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if new and not re.search(r"#.*\[[^\]]*\]", statement):
            yield new[0], node.lineno


def exercises(nb: Notebook) -> Found:
    """At least two exercises, each a stub followed by its check."""
    stubs = [i for i, cell in enumerate(nb.code) if "exercise" in tags(cell)]
    if len(stubs) < EXERCISES:
        yield "", f"expected at least {EXERCISES} cells tagged 'exercise', got {len(stubs)}"
    for i in stubs:
        if i + 1 == len(nb.code) or not _asks(nb.code[i + 1]):
            yield _id(nb.code[i]), "expected lesson.check(...) in the code cell after the stub"


def _asks(cell: dict) -> bool:
    """Whether a cell judges an exercise."""
    return bool(re.search(r"\blesson\.(?:check|beat|beat_contest)\(", source(cell)))


def folded_plumbing(nb: Notebook) -> Found:
    """Cells that set up, measure, tabulate or draw are folded; kernels, their variants and exercises are
    open."""
    for cell in nb.code:
        folded, is_open = FOLDED in tags(cell), OPEN & set(tags(cell))
        if is_open and folded:
            yield _id(cell), f"expected no tag {FOLDED!r} on a cell tagged {', '.join(sorted(is_open))!r}"
        found = PLUMBING.search(source(cell))
        if found and not is_open and not folded:
            yield _id(cell), f"expected the tag {FOLDED!r} on a cell that calls {found.group()[:-1]}"


def true_verdicts(nb: Notebook) -> Found:
    """A verdict that a text states is one that the records give."""
    said = [(cell, text) for cell in nb.cells for text in _shown(cell) if claims.stated(text)]
    given = claims.given(_tables(nb)) if said else set()
    for cell, text in said:
        for verdict in claims.stated(text):
            if verdict not in given:
                yield _id(cell), f"no record of this chapter gives the verdict {verdict!r}"


def judged(nb: Notebook) -> Found:
    """A chapter whose noise was measured says with a verdict what is faster, and by how much.

    It holds for chapters that have a verdict or a control row; the others await their measurement."""
    asks = any(VERDICTS.search(source(cell)) for cell in nb.code)
    controls = any(table.controls for table in claims.tables_of(nb.name))
    if controls and not asks and nb.name in dict(STEPS):
        yield "", "expected lesson.verdict(...): the record has a control row that no verdict uses"
    if asks or controls:
        for cell in nb.cells:
            for text in _shown(cell):
                for sentence in claims.unjudged(text):
                    yield _id(cell), f"a comparison without a verdict (bench.verdict): {sentence[:120]}"


def _shown(cell: dict) -> Iterator[str]:
    """The Markdown that a reader sees of a cell; none of a prediction, which is no verdict."""
    if "prediction" in _id(cell):
        return
    if cell["cell_type"] == "markdown":
        yield source(cell)
    for output in cell.get("outputs", []):
        yield "".join(output.get("data", {}).get("text/markdown", ""))


def _tables(nb: Notebook) -> list:
    return claims.tables_of(nb.name, "\n".join(source(cell) for cell in nb.code))


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        valid_format,
        stable_ids,
        execution_order,
        no_errors,
        no_stderr,
        small,
        no_machine_paths,
        no_embedded_images,
        no_noise,
        title,
        box,
        begins,
        sizes,
        named_figures,
        kernel_cell,
        exercises,
        folded_plumbing,
        true_verdicts,
        judged,
    )
}


def check(path: Path) -> list[Problem]:
    """All problems of one notebook file; empty if it is as it must be."""
    try:
        notebook = Notebook.read(path)
    except ValueError as error:
        return [Problem(path.stem, "", "readable", f"not a notebook: {error}")]
    return [
        Problem(notebook.name, cell, name, message)
        for name, rule in RULES.items()
        for cell, message in rule(notebook)
    ]
