"""The files around the code: one set of versions, true commands, clean text; and what an import loads."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from project_files import committed

from attnlib.bench.paths import ROOT

TEXTS = ["README.md", "CONTRIBUTING.md"]


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


def test_the_second_set_is_the_tested_one_but_for_torch(tested):
    """`make next` takes all else from constraints.txt."""
    other = pins((ROOT / "constraints-next.txt").read_text().splitlines())
    assert set(other) == {"torch", "triton"} and not other.items() & tested.items()
    texts = [(ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")]
    assert all(f"torch {other['torch']}" in text for text in texts)
    assert f"triton {other['triton']}" in texts[0] and f"| {other['triton']} | {other['torch']} |" in texts[1]


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


def anchors(page: Path) -> set[str]:
    """What "#..." of a link to a Markdown page may be: its headings, as GitHub and MyST write them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", [*TEXTS, "notebooks/index.md", "notebooks/results.md"])
def test_local_links_lead_somewhere(name):
    text = re.sub(r"`[^`\n]+`", "", (ROOT / name).read_text())
    for link, place in re.findall(r"\]\(([^)#:]+)(?:#([^)]*))?\)", text):
        page = (ROOT / name).parent / link
        assert page.exists(), f"{name} links to {link}, which does not exist"
        if place:
            assert place in anchors(page), f"{name} links to {link}#{place}, a heading that does not exist"


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


# What must not stand in the project, in small letters. No pattern matches its own spelling here.
FORBIDDEN = {
    "a path of one machine": r"/(?<![\w.]/)(?:[w]ork|[r]oot|[t]mp|[f]arm|[h]ome)/\w",
    "a package registry": r"--[i]ndex-url|[f]ind-links|[p]ypi\.org|[r]egistry\.npmjs",
    "how it was written": r"[s]ub-?agent|[t]his session\b|\ba[i] assistant|[l]anguage model wrote",
}
BINARY = {".pdf", ".png"}
OF_OTHERS = {".gz", ".xz", ".zip", ".tar", ".whl", ".so", ".o", ".cubin"}
"""Archives and compiled code: builds of other projects that are timed beside ours, under their licences."""


def test_no_archive_and_no_compiled_code_is_committed():
    assert [path.name for path in committed() if path.suffix in OF_OTHERS] == []


@pytest.mark.parametrize("what", FORBIDDEN)
def test_text_is_clean(what):
    pattern, hits = re.compile(FORBIDDEN[what]), []
    for path in committed():
        if path.suffix in BINARY or "mathjax" in path.parts:
            continue
        text = path.read_text(errors="replace").lower()
        for found in pattern.finditer(text):
            number = text.count("\n", 0, found.start()) + 1
            around = text[max(0, found.start() - 30) : found.end() + 30]
            hits.append(f"{path.relative_to(ROOT)}:{number}: {around}")
    assert not hits, f"{what}:\n" + "\n".join(hits)


# ---------------------------------------------------------------- what an import loads


def fresh(code: str) -> str:
    """Output of a fresh interpreter."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def imported() -> list[str]:
    """After the imports: how many of attnlib's operators have FLOPs, and the packages that were loaded."""
    code = (
        "import attnlib, attnlib.hf, sys; loaded = {name.split('.')[0] for name in sys.modules}; "
        "from torch.utils.flop_counter import flop_registry; "
        "print(sum('attnlib' in str(op) for op in flop_registry), *loaded)"
    )
    return fresh(code).split()


def test_import_needs_torch_and_triton_only(imported):
    tools = {"matplotlib", "seaborn", "IPython", "nbformat", "nbconvert", "pandas", "transformers"}
    assert "torch" in imported and not tools & set(imported)


def test_import_leaves_triton_alone(imported):
    """A notebook imports attnlib first, then lesson chooses triton's interpreter. Yet FLOPs are counted."""
    assert imported[0] == "8" and "triton" not in imported


def test_import_is_quick():
    """Under 0.5 s of CPU time on top of torch and triton; where a run takes longer, a second one decides."""
    code = (
        "import torch, triton, time; a = time.process_time(); import attnlib; print(time.process_time() - a)"
    )
    seconds = float(fresh(code))
    if seconds >= 0.5:
        seconds = float(fresh(code))
    assert seconds < 0.5, f"import attnlib took {seconds:.2f} s"


def test_empty_memory_is_poisoned():
    import torch

    assert torch.empty(3, dtype=torch.float16).isnan().all()
    assert torch.empty_like(torch.zeros(3)).isnan().all()
    assert torch.zeros(3).new_empty(4, dtype=torch.bfloat16).isnan().all()
