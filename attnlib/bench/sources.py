"""Kernels as notebook cells: reading a cell, importing it as a module, showing the difference of two of
them."""

import difflib
import functools
import hashlib
import html
import importlib.util
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from attnlib.bench.changes import changed
from attnlib.bench.files import write_atomically
from attnlib.bench.paths import NOTEBOOKS


def cells_tagged(notebook: Path, tag: str) -> list[str]:
    """Sources of the code cells of a notebook file that carry `tag`, in order."""
    if not notebook.exists():
        raise FileNotFoundError(
            f"notebook: expected the file {notebook.name} in {notebook.parent.name}/, found none"
        )
    try:
        cells = _code_cells(notebook.read_text(encoding="utf-8"))
        return [source for source, tags in cells if tag in tags]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{notebook}: expected a notebook, got {type(error).__name__}: {error}") from error


@functools.lru_cache(maxsize=64)
def _code_cells(text: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Source and tags of each code cell of a notebook file with this text. A chapter's kernels are read again
    for each that is compiled."""
    return tuple(
        ("".join(cell["source"]), tuple(cell.get("metadata", {}).get("tags", [])))
        for cell in json.loads(text)["cells"]
        if cell["cell_type"] == "code"
    )


def kernel_source(notebook: Path) -> str:
    """The source of the one code cell tagged `kernel`, with what the cells tagged `change` make of it;
    ValueError if there is no such cell or more than one. A notebook with changes may go on where another one
    ended, and has no such cell then."""
    return list(kernel_sources(notebook).values())[-1]


def kernel_sources(notebook: Path) -> dict[str, str]:
    """What `kernel_source` is before the changes and after each of them. The first line of a change is
    "# change NAME", of one that begins with the kernel of another notebook "# change NAME, of NOTEBOOK"; the
    name of what is there before is that of its notebook."""
    found, changes = cells_tagged(notebook, "kernel"), cells_tagged(notebook, "change")
    heads = [re.match(r"# change (\w+)(?:, of (\w+))?\n", change) for change in changes]
    if None in heads:
        raise ValueError(f"{notebook.stem}: expected '# change NAME' as the first line of each change")
    if not found and heads and heads[0][2]:
        text, step = kernel_source(notebook.parent / f"{heads[0][2]}.ipynb"), heads[0][2]
    elif len(found) == 1:
        text, step = found[0].rstrip() + "\n", notebook.stem
    else:
        raise ValueError(f"{notebook.stem}: expected one code cell tagged 'kernel', found {len(found)}")
    texts = {step: text}
    for head, change in zip(heads, changes, strict=True):
        text = texts[head[1]] = changed(text, change.removeprefix(head[0]))
    return texts


def variant_sources(notebook: Path, base: str) -> dict[str, str]:
    """Kernels beside one of another notebook: `base`, a step, and what each variant makes of it. A cell
    tagged `variant` has one or more; each begins with a line "# variant NAME", or "# variant NAME, of OTHER"
    where it goes on with another variant."""
    texts = {base: kernel_source(notebook.parent / f"{base}.ipynb")}
    for cell in cells_tagged(notebook, "variant"):
        for change in re.split(r"(?m)^(?=# variant )", cell)[1:]:
            head = re.match(r"# variant (\w+)(?:, of (\w+))?\n", change)
            if not head or (head[2] or base) not in texts:
                wanted = f"'# variant NAME' or, behind it, ', of' one of {', '.join(texts)}"
                raise ValueError(f"{notebook.stem}: expected {wanted}, got {change.splitlines()[0]!r}")
            texts[head[1]] = changed(texts[head[2] or base], change.removeprefix(head[0]))
    return texts


def load_source(name: str, source: str) -> ModuleType:
    """Import `source` as a module. The same source gives the same module object.

    Triton reads the text of a kernel from its file, so the source is written to one, in a private folder
    outside of the project whose name has a hash of the content: an edited cell gets a new file, and no
    process sees half of one."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    module_name = f"attnlib_kernel_{name}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    path = _cache_dir() / digest / f"{name}.py"
    if not path.exists() or path.read_bytes() != source.encode():
        write_atomically(path, source)
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def notebooks_dir() -> Path:
    """The folder of the notebooks: beside the package, or the current folder."""
    for folder in (NOTEBOOKS, Path.cwd(), Path.cwd() / "notebooks"):
        if any(folder.glob("[0-9][0-9]_*.ipynb")):
            return folder
    return NOTEBOOKS


def notebook_of(step: str) -> Path:
    """The file of the notebook `step`, such as "03_online_softmax"."""
    return notebooks_dir() / f"{step}.ipynb"


def load_step(step: str) -> ModuleType:
    """The kernel cell of notebook `step` as a module. Kernel cells that build on those of earlier chapters
    import them with it."""
    return load_source(step, kernel_source(notebook_of(step)))


def _cache_dir() -> Path:
    """<temporary folder>/attnlib-kernels-<user id>, readable and writable by its owner alone."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"attnlib-kernels-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != user:
        raise PermissionError(
            f"kernel cache: expected {folder} to be a folder of this user; remove it and try again"
        )
    return folder


_LINE_STYLES = {
    "+": "background:rgba(46,160,67,.18);",
    "-": "background:rgba(213,94,0,.18);",
    "@": "opacity:.55;",
}


def diff_lines(old: str, new: str, old_name: str, new_name: str, context: int = 2) -> list[str]:
    """A unified diff as lines, its two header lines first; empty if the texts are equal."""
    return list(
        difflib.unified_diff(old.splitlines(), new.splitlines(), old_name, new_name, n=context, lineterm="")
    )


def diff_bundle(old: str, new: str, old_name: str, new_name: str) -> dict[str, str]:
    """A MIME bundle of the diff: HTML whose colors suit light and dark pages, and plain text that says the
    same."""
    lines = diff_lines(old, new, old_name, new_name)
    added = sum(line.startswith("+") for line in lines[2:])
    removed = sum(line.startswith("-") for line in lines[2:])
    title = f"{old_name} → {new_name}: {added} line{'s' * (added != 1)} added, {removed} removed"
    whole = "display:inline-block;min-width:100%;"
    body = "\n".join(
        f'<span style="{whole}{_LINE_STYLES.get(line[:1], "")}">{html.escape(line)}</span>'
        for line in lines[2:]
    )
    page = (
        f'<div style="margin:.5em 0"><strong>{html.escape(title)}</strong>\n'
        '<pre style="overflow-x:auto;padding:.5em;line-height:1.35;font-size:.85em">\n'
        f"{body}\n</pre></div>"
    )
    return {"text/html": page, "text/plain": "\n".join([title, *lines[2:]])}
