"""The whole book replayed once: every notebook runs, stubs fail, solutions pass, figures and tables are the
records'.

One pass, two notebooks at a time, drawn as the paper's figures (ATTNLIB_PAPER=1), serves all tests of this
file. Solutions and checks are tried in this process while it goes on: else one core would be left to them at
the end."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib
import pytest

from attnlib.book import build, execution, lesson
from attnlib.book import readme as tables_of_readme
from tests.helpers.drawings import difference

FIGURES = build.ROOT / "figures"
CHAPTERS = sorted(build.NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
NAMES = [path.stem for path in CHAPTERS]
CPU_MINUTES = 12
"""What a replay may take of all cores together: time on the clock says as much of what else runs here."""


@pytest.fixture(scope="session", autouse=True)
def replaying(request, tmp_path_factory):
    """(folder of the executed copies, the results to come), if a test asks for them. What needs no replay is
    tested meanwhile."""
    if not any("replayed" in item.fixturenames for item in request.session.items):
        yield None
        return
    out = tmp_path_factory.mktemp("replay")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as beside:
        patch.setenv("ATTNLIB_PAPER", "1")
        yield out, beside.submit(
            execution.execute_all, CHAPTERS[::-1],  # short ones at the end: none is at work there alone
            lambda path: out / path.name, mode=execution.REPLAY, jobs=build.default_jobs(),
        )  # fmt: skip


@pytest.fixture(scope="session")
def replayed(replaying):
    """(folder of the executed copies, name -> result)."""
    out, results = replaying
    return out, {result.notebook: result for result in results.result()}


@pytest.fixture(scope="session")
def redrawn(replayed, tmp_path_factory) -> dict[str, bytes]:
    """File name -> content of the figures of the replayed notebooks, through nbconvert."""
    out, results = replayed
    good = [name for name, result in results.items() if result.ok]
    files = build.figures(out, tmp_path_factory.mktemp("figures"), good) if good else []
    return {file.name: file.read_bytes() for file in files}


def cells(path: Path) -> list[dict]:
    return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]


def printed(cell: dict) -> str:
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


# ---------------------------------------------------------------- while notebooks are replayed


@pytest.mark.parametrize("name", NAMES)
def test_solutions_pass(name):
    checks, solutions = lesson.checks(name), lesson.solutions(name)
    for exercise in lesson.exercises(name):
        assert hasattr(solutions, exercise), f"solutions/{name}.py: expected {exercise}"
        getattr(checks, f"check_{exercise}")(getattr(solutions, exercise))


@pytest.mark.parametrize("name", NAMES)
def test_checks_explain_themselves(name):
    """A wrong answer of the right kind gives a message, not a crash without one."""
    for exercise in lesson.exercises(name):
        with pytest.raises(Exception) as caught:
            getattr(lesson.checks(name), f"check_{exercise}")(lambda *args, **options: None)
        assert str(caught.value).strip(), f"{name}: check_{exercise} says nothing"


def test_the_book_has_its_chapters():
    assert NAMES == [name for name, _ in lesson.CHAPTERS]


# ---------------------------------------------------------------- what was replayed


@pytest.mark.parametrize("name", NAMES)
def test_replays(name, replayed):
    _, results = replayed
    assert results[name].ok, results[name].failure


@pytest.mark.parametrize("name", NAMES)
def test_replay_writes_nothing_to_stderr(name, replayed):
    out, _ = replayed
    noise = [o for c in cells(out / f"{name}.ipynb") for o in c["outputs"] if o.get("name") == "stderr"]
    assert noise == []


def test_replay_is_fast(replayed):
    _, results = replayed
    assert 0 < sum(result.cpu_seconds for result in results.values()) < 60 * CPU_MINUTES


@pytest.mark.parametrize("name", NAMES)
def test_stubs_fail_and_each_exercise_is_asked(name, replayed):
    """In the notebook as it is, each lesson.check answers "not yet", and each check has its exercise."""
    out, _ = replayed
    asked = {}
    for cell in cells(out / f"{name}.ipynb"):
        if "lesson.beat" in "".join(cell["source"]):  # without a GPU nothing is beaten
            assert re.fullmatch(r"✘ not yet: .+ To beat: .* ms, .*\n", printed(cell))
        for check in re.findall(r"lesson\.check\(\s*checks\.check_(\w+)", "".join(cell["source"])):
            asked[check] = printed(cell)
    assert sorted(asked) == sorted(lesson.exercises(name))
    assert len(asked) >= 2
    for check, text in asked.items():
        assert text.startswith("✘ not yet") and "✔" not in text, f"{name}: the stub of {check}: {text}"


def pinned_matplotlib() -> str | None:
    """The version that the committed figures were drawn with."""
    constraints = build.ROOT / "constraints.txt"
    found = (
        re.search(r"^matplotlib==(\S+)", constraints.read_text(), re.MULTILINE)
        if constraints.exists()
        else None
    )
    return found.group(1) if found else None


@pytest.mark.skipif(
    pinned_matplotlib() not in (None, matplotlib.__version__),
    reason=f"figures were drawn with matplotlib {pinned_matplotlib()}, this is {matplotlib.__version__}",
)
def test_figures_are_the_same_when_redrawn(redrawn):
    """The same drawing, whatever the processor: see `tests.helpers.drawings`."""
    committed = {
        path.name: path.read_bytes() for path in sorted([*FIGURES.glob("*.svg"), *FIGURES.glob("*.pdf")])
    }
    assert sorted(redrawn) == sorted(committed)
    different = {name: difference(committed[name], data) for name, data in redrawn.items()}
    different = {name: where for name, where in different.items() if where}
    assert different == {}, "redraw them: ATTNLIB_PAPER=1 python -m attnlib.book replay, then figures"


def test_figures_are_fit_for_print(redrawn):
    assert redrawn
    for name, data in redrawn.items():
        if name.endswith(".pdf"):
            assert data.startswith(b"%PDF") and b"/Type3" not in data, (
                f"{name}: expected embedded TrueType fonts"
            )
        else:
            assert b'role="img"' in data and b"<title>" in data, f"{name}: expected an alternative text"
            assert float(re.search(rb'width="([\d.]+)pt"', data).group(1)) <= 396.5, (
                f"{name}: wider than the text"
            )


@pytest.mark.parametrize("name", NAMES)
def test_committed_and_replayed_outputs_have_the_same_figures(name, replayed):
    """The outputs in git are of the same notebook: same cells, same figures."""
    out, _ = replayed
    committed, again = cells(build.NOTEBOOKS / f"{name}.ipynb"), cells(out / f"{name}.ipynb")
    assert [c["id"] for c in committed] == [c["id"] for c in again]

    def figures(cell: dict) -> list[str]:
        return [o["metadata"]["filename"] for o in cell["outputs"] if o.get("metadata", {}).get("filename")]

    assert [figures(c) for c in committed] == [figures(c) for c in again]


def test_pages_show_the_tables_of_the_records():
    assert list(tables_of_readme.stale()) == [], "python -m attnlib.book readme"


def test_readme_shows_figures_that_exist():
    for name in re.findall(r"\((figures/[\w./-]+)\)", tables_of_readme.README.read_text(encoding="utf-8")):
        assert (build.ROOT / name).exists(), f"README shows {name}"
