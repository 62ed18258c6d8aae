"""The files around the code: one set of versions, true commands, file sizes, import arrows, clean text."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from attnlib.bench.paths import ROOT

MODULES = sorted((ROOT / "attnlib").rglob("*.py"))
TEXTS = ["README.md", "CONTRIBUTING.md"]


def committed() -> list[Path]:
    """Files of the project: what git has or would take; without git, what is not hidden or built."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        listed = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
        listed = [name for name in listed if not name.startswith("build/")]
    keep = [name for name in listed if not name.startswith(".") or name.startswith((".ci/", ".git"))]
    return [ROOT / name for name in keep if not name.startswith(".git/") and (ROOT / name).is_file()]


# ---------------------------------------------------------------- versions


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lines: list[str]) -> dict[str, str]:
    """{name: exact version} of lines such as "torch==2.11.0"; other lines are left out."""
    found = (re.fullmatch(r"([\w.-]+)==(\S+)", line.strip()) for line in lines)
    return {normal(match[1]): match[2] for match in found if match}


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def requirements(project) -> list[str]:
    extras = project["optional-dependencies"]
    return project["dependencies"] + extras["book"] + extras["dev"]


@pytest.fixture(scope="module")
def tested() -> dict[str, str]:
    return pins((ROOT / "constraints.txt").read_text().splitlines())


@pytest.fixture(scope="module")
def environment() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def pip_section(environment: dict) -> list[str]:
    return next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))


def test_every_requirement_has_one_tested_version_that_it_accepts(requirements, tested):
    from packaging.requirements import Requirement

    for requirement in map(Requirement, requirements):
        version = tested.get(normal(requirement.name))
        assert version, f"{requirement.name} has no version in constraints.txt"
        assert requirement.specifier.contains(version), f"{requirement} does not accept the tested {version}"


def test_environment_has_the_tested_versions_of_what_pyproject_asks_for(environment, requirements, tested):
    from packaging.requirements import Requirement

    listed = pins(pip_section(environment))
    assert set(listed) == {normal(Requirement(line).name) for line in requirements}
    assert listed == {name: tested[name] for name in listed}
    assert "-c constraints.txt" in pip_section(environment)
    assert "-e ." in pip_section(environment)


def test_environment_python_is_new_enough(environment, project):
    from packaging.specifiers import SpecifierSet

    python = next(entry for entry in environment["dependencies"] if str(entry).startswith("python="))
    assert SpecifierSet(project["requires-python"]).contains(python.split("=")[1])


def test_this_environment_is_recognizable(tested):
    """numpy >= 2.4 breaks loops in the interpreter of triton 3.6 with an error that does not name numpy."""
    import numpy
    import triton
    from packaging.version import Version

    assert Version(numpy.__version__) < Version("2.4") or Version(triton.__version__) >= Version("3.7")
    assert tested["torch"] == "2.11.0" and tested["triton"] == "3.6.0", "records in figures/data are of these"


def test_citation_and_package_agree(project):
    import attnlib

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["authors"] == project["authors"] == [{"name": "The attnlib authors"}]
    assert citation["version"] == project["version"] == attnlib.__version__
    assert citation["license"] == project["license"] == "MIT"


# ---------------------------------------------------------------- commands and texts


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.M))


@pytest.mark.parametrize("name", TEXTS)
def test_text_names_real_make_targets(name):
    named = set(re.findall(r"`make ((?:[a-z]+ ?)+)[^`]*`", (ROOT / name).read_text()))
    named |= set(re.findall(r"^ *make ([a-z]+)", (ROOT / name).read_text(), flags=re.M))
    unknown = {target for names in named for target in names.split()} - make_targets()
    assert not unknown, f"{name}: no such make target: {sorted(unknown)}"
    assert "test" in named


@pytest.mark.parametrize("name", [*TEXTS, "notebooks/index.md"])
def test_local_links_lead_somewhere(name):
    text = re.sub(r"`[^`\n]+`", "", (ROOT / name).read_text())
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / name).parent / link).exists(), f"{name} links to {link}, which does not exist"


def test_readme_names_the_tested_versions_and_holds_the_ladder(tested):
    readme = (ROOT / "README.md").read_text()
    assert f"torch {tested['torch']}" in readme and f"triton {tested['triton']}" in readme
    assert readme.index("<!-- ladder -->") < readme.index("<!-- /ladder -->")
    assert "figures/record_ladder.svg" in readme


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in text
    assert re.search(r"^make test$", text, flags=re.M)
    subprocess.run(["bash", "-n", script], check=True)


# What must not stand in the project; each pattern is spelled so that it does not match itself.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.])/(?:[w]ork|[r]oot|[t]mp|[f]arm|[h]ome)/\w",
    "a package registry": r"--[i]ndex-url|[f]ind-links|[p]ypi\.org|[r]egistry\.npmjs",
    "how it was written": r"[s]ub-?agent|[t]his session\b|\bA[I] assistant|[l]anguage model wrote",
}
BINARY = {".pdf", ".png", ".gz", ".xz", ".whl"}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_text_is_clean(what):
    pattern, hits = re.compile(FORBIDDEN[what], re.I), []
    for path in committed():
        if path.suffix in BINARY or "mathjax" in path.parts:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if found := pattern.search(line):
                around = line[max(0, found.start() - 30) : found.end() + 30]
                hits.append(f"{path.relative_to(ROOT)}:{number}: {around}")
    assert not hits, f"{what}:\n" + "\n".join(hits)


# ---------------------------------------------------------------- the code's shape


def test_files_are_short():
    lengths = {path: len(path.read_text().splitlines()) for path in MODULES}
    long = {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > 600}
    assert not long, f"longer than 600 lines: {long}"
    assert statistics.median(lengths.values()) < 250


def own_imports(path: Path) -> set[str]:
    """Modules of attnlib that a file imports, at its top or in a function: {"configs", "kernels.forward"}."""
    names, package = set(), path.relative_to(ROOT).with_suffix("").parts
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not is_main_guard(node)]  # where it starts a CLI
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: -node.level] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names} | {base}
    modules = {module_name(module) for module in MODULES}
    return {name.removeprefix("attnlib.") for name in names if name.startswith("attnlib.")} & modules


def is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT / "attnlib").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


GRAPH = {module_name(path): own_imports(path) for path in MODULES if path.name != "__init__.py"}


def reach(module: str) -> set[str]:
    seen, todo = set(), [module]
    while todo:
        for name in GRAPH.get(todo.pop(), ()):
            if name not in seen:
                seen.add(name)
                todo.append(name)
    return seen


def room(module: str) -> str:
    """The folder of attnlib that a module is in; "" for the modules at its top."""
    first = module.partition(".")[0]
    return first if (ROOT / "attnlib" / first).is_dir() else ""


def test_arrows_point_one_way():
    assert not [module for module in GRAPH if module in reach(module)], "modules that import each other"


TOOLS = ("bench", "book", "emulator")
PRODUCT = [module for module in GRAPH if room(module) not in TOOLS and module != "task"]
"""All of attnlib but the rooms of the tools, and the harness of the benchmark task, which measures."""


@pytest.mark.parametrize("module", PRODUCT)
def test_the_product_knows_no_tool(module):
    assert not {room(other) for other in reach(module)} & set(TOOLS)


def test_tools_do_not_know_the_book():
    for module in GRAPH:
        if room(module) in ("bench", "emulator"):
            assert "book" not in {room(other) for other in reach(module)}, module


def fresh(code: str) -> str:
    """Output of a fresh interpreter."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_import_needs_torch_and_triton_only():
    loaded = fresh("import attnlib, sys; print(*{name.split('.')[0] for name in sys.modules})").split()
    assert not {"matplotlib", "seaborn", "IPython", "nbformat", "nbconvert", "pandas"} & set(loaded)


def test_import_leaves_triton_alone():
    """A notebook imports attnlib first, then lesson chooses triton's interpreter. Yet FLOPs are counted."""
    code = (
        "import attnlib, sys; print('triton' in sys.modules); from torch.utils.flop_counter import "
        "flop_registry; print(sum('attnlib' in str(op) for op in flop_registry))"
    )
    assert fresh(code).split() == ["False", "2"]


def test_import_is_quick():
    """Under 0.5 s on top of torch and triton; the better of two, so that a busy machine does not fail it."""
    code = (
        "import torch, triton, time; a = time.perf_counter(); import attnlib; print(time.perf_counter() - a)"
    )
    seconds = min(float(fresh(code)) for _ in range(2))
    assert seconds < 0.5, f"import attnlib took {seconds:.2f} s"


def test_empty_memory_is_poisoned():
    import torch

    assert torch.empty(3, dtype=torch.float16).isnan().all()
    assert torch.empty_like(torch.zeros(3)).isnan().all()
    assert torch.zeros(3).new_empty(4, dtype=torch.bfloat16).isnan().all()
