"""The code's shape: sizes of files, which way imports point, lengths of signatures. The folders are walked:
a new module or a new family is held to the same rules without a word here."""

from __future__ import annotations

import ast
import functools
import re
import statistics
from collections import Counter
from pathlib import Path

import pytest
from project_files import committed

from attnlib.bench.imports import imported_files, imported_names, reach
from attnlib.bench.paths import PACKAGE, ROOT, TESTS

MODULES = sorted(PACKAGE.rglob("*.py"))
TOOLS = "bench", "book", "emulator"
"""The rooms beside the product, to which all other folders of attnlib belong."""
KERNELS = PACKAGE / "kernels"
REGISTRY, COMMON = KERNELS / "__init__.py", KERNELS / "common"
FAMILIES = [path for path in sorted(KERNELS.iterdir()) if (path / "__init__.py").is_file() and path != COMMON]


def short(files: set[Path] | list[Path]) -> list[str]:
    return sorted(str(file.relative_to(ROOT)) for file in files)


@functools.cache
def imports(file: Path) -> set[Path]:
    """The modules that a module itself imports."""
    return imported_files(file) - {file}


def below(file: Path) -> set[Path]:
    """All modules that a module imports, and that these do."""
    return reach([file], imports)


def is_command(file: Path) -> bool:
    """Whether `python -m` runs it: a command is above what it starts."""
    guards = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.If)]
    named = any(ast.unparse(guard.test) == "__name__ == '__main__'" for guard in guards)
    return named or file.name == "__main__.py"


@functools.cache
def room(file: Path) -> str:
    """One of `TOOLS`, or "product"; a command of the product, which may measure, is a room of its own."""
    first = file.relative_to(PACKAGE).parts[0]
    return first if first in TOOLS or is_command(file) else "product"


PRODUCT = [file for file in MODULES if room(file) == "product"]

# ---------------------------------------------------------------- sizes


def test_files_are_short():
    lengths = {file: len(file.read_text().splitlines()) for file in MODULES}
    long = {str(file.relative_to(ROOT)): length for file, length in lengths.items() if length > 600}
    assert not long, f"longer than 600 lines: {long}"
    assert statistics.median(lengths.values()) < 250


def test_few_files_are_at_the_top():
    at_the_top = [path for path in committed() if path.parent == PACKAGE]
    assert len(at_the_top) <= 12, short(at_the_top)


@functools.cache
def chapters() -> set[str]:
    return {path.name[:2] for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")}


GLUON = [path for path in sorted(KERNELS.rglob("*.py")) if "@gluon.jit" in path.read_text()]


@pytest.mark.parametrize("file", GLUON, ids=lambda file: str(file.relative_to(KERNELS)))
def test_a_hopper_kernel_names_the_chapter_that_teaches_it(file):
    said = re.findall(r"[Cc]hapters?\s+(\d\d)", ast.get_docstring(ast.parse(file.read_text())))
    assert said and set(said) <= chapters(), f"{short([file])}: chapters {said}"


def test_the_map_has_every_place():
    """CONTRIBUTING.md names each file and folder of attnlib, and each family of kernels."""
    said = (ROOT / "CONTRIBUTING.md").read_text()
    inside = {path.relative_to(PACKAGE).parts for path in committed() if path.is_relative_to(PACKAGE)}
    places = {parts[0] if len(parts) == 1 else f"{parts[0]}/" for parts in inside} - {"__init__.py"}
    places |= {family.name for family in [*FAMILIES, COMMON]}
    assert not sorted(place for place in places if f"`{place}`" not in said)


# ---------------------------------------------------------------- arrows


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_circle(file):
    assert file not in below(file), f"imports itself by way of {short(imports(file))}"


def test_rooms_have_no_circle():
    """book -> bench -> product: where one room imports another, that one does not import it, by any way."""
    rooms = {room(file): set() for file in MODULES}
    for file, others in ((file, imports(file)) for file in MODULES):
        rooms[room(file)] |= {room(other) for other in others} - {room(file)}
    assert {"product", *TOOLS} <= set(rooms) and "bench" in rooms["book"] and "product" in rooms["bench"]
    for name in rooms:
        assert name not in reach([name], rooms.__getitem__), f"{name} imports itself by way of {rooms[name]}"


@pytest.mark.parametrize("file", PRODUCT, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_the_product_imports_no_tool_and_no_command(file):
    assert not short({other for other in below(file) if room(other) != "product"})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_imports_no_family(family):
    """Nor anything that imports one, such as the registry."""
    for file in family.rglob("*.py"):
        others = {other for other in below(file) if other.is_relative_to(KERNELS)}
        others -= {other for other in others if other.is_relative_to(family) or other.is_relative_to(COMMON)}
        assert not others, f"{short([file])} leads to {short(others)}"


def test_what_families_share_imports_no_family():
    for file in COMMON.rglob("*.py"):
        others = {other for other in below(file) if other.is_relative_to(KERNELS)}
        assert not short({other for other in others if not other.is_relative_to(COMMON)})


def test_the_product_finds_families_in_the_registry_alone():
    for file in PRODUCT:
        if not file.is_relative_to(KERNELS):
            inside = {other for other in imports(file) if any(map(other.is_relative_to, FAMILIES))}
            assert not inside, f"{short([file])} imports {short(inside)}"
    assert FAMILIES and all(family / "__init__.py" in below(REGISTRY) for family in FAMILIES)


def test_no_test_imports_a_test():
    names = {file.stem for file in TESTS.rglob("test_*.py")} | {"conftest"}
    for file in [*TESTS.rglob("test_*.py"), TESTS / "conftest.py", *(TESTS / "helpers").glob("*.py")]:
        imported = {name.partition(".")[0] for name in imported_names(file.read_text())}
        assert not imported & names, f"{short([file])} imports {sorted(imported & names)}"


def test_tests_of_one_process_have_names_of_their_own():
    """pytest imports them by their names alone; tests/compile is a process by itself."""
    names = Counter(file.name for file in TESTS.rglob("test_*.py") if file.parent != TESTS / "compile")
    assert [name for name, count in names.items() if count > 1] == []


# ---------------------------------------------------------------- signatures


def parameters(node: ast.FunctionDef) -> int:
    """How many, without self and cls."""
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([arg for arg in given if arg.arg not in ("self", "cls")])


def public(tree: ast.Module) -> set[str]:
    """Names that a module offers to users: those of `__all__`."""
    lists = [node.value for node in tree.body if isinstance(node, ast.Assign)
             if ast.unparse(node.targets[0]) == "__all__"]  # fmt: skip
    return {name for node in lists for name in ast.literal_eval(node)}


def prescribed(tree: ast.Module) -> set[str]:
    """Names of functions whose parameters PyTorch or transformers give: registered with one of them, or a
    method of an autograd function."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            found |= {node.name} if "custom_op" in decorators or ".register" in decorators else set()
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].startswith(
            ("register", "impl")
        ):
            found |= {argument.id for argument in node.args if isinstance(argument, ast.Name)}
        elif isinstance(node, ast.ClassDef) and "Function" in " ".join(map(ast.unparse, node.bases)):
            found |= {method.name for method in node.body if isinstance(method, ast.FunctionDef)}
    return found


def test_signatures_are_short():
    """In the product outside of its kernels, besides functions that users call and `prescribed` ones."""
    trees = {file: ast.parse(file.read_text()) for file in PRODUCT if not file.is_relative_to(KERNELS)}
    offered = set().union(*map(public, trees.values()))
    long = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}: {parameters(node)}"
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name not in offered | prescribed(tree)
        if parameters(node) > 6
    ]
    assert offered and not long, "more than 6 parameters:\n" + "\n".join(long)
