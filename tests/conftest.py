"""What every test runs under: GPU, interpreter or compiler; and memory that is never clean by luck.

pytest tests           with a CUDA GPU: kernels run on it, tests/gpu is collected; else Triton's interpreter
pytest tests/compile   kernels compiled for sm_90, no GPU needed; a process of its own, because an
                       interpreted function can't be compiled
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import chosen
import hypothesis
import pytest

# The interpreter is slow, some machines are slower, and runs are compared: no deadline, none for making
# examples either, and the same examples every time.
hypothesis.settings.register_profile(
    "attnlib", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("attnlib")

# Kernels, compiled or interpreted, make millions of small objects and no cycles: to look for these after each
# 700, as Python does, takes a tenth of the time.
gc.set_threshold(100_000, 50, 100)

HERE = Path(__file__).resolve().parent
collect_ignore_glob: list[str] = []
_header: list[str] = []
_left_out: list[int] = []
"""Cases that were not collected, as each process of pytest-xdist counts them: each has collected all."""


def pytest_configure(config: pytest.Config) -> None:
    """Choose the world before any test module imports triton."""
    import torch

    paths = [(config.invocation_params.dir / str(arg).split("::")[0]).resolve() for arg in config.args]
    compiling = bool(paths) and all(path.is_relative_to(HERE / "compile") for path in paths)
    gpu = torch.cuda.is_available()
    if compiling:
        os.environ.pop("TRITON_INTERPRET", None)
        _header.append("attnlib: compiling for sm_90, nothing is run")
        return
    collect_ignore_glob.append(str(HERE / "compile" / "*"))
    if gpu:
        _header.append(f"attnlib: kernels run on {torch.cuda.get_device_name()}; tests/gpu collected")
    else:
        os.environ["TRITON_INTERPRET"] = "1"
        collect_ignore_glob.append(str(HERE / "gpu" / "*"))
        _header.append("attnlib: no CUDA GPU: kernels run in Triton's interpreter")
        from attnlib.emulator.interpreter import save_work

        save_work()
        _header.append("attnlib: no CUDA GPU: tests/gpu was NOT collected")
    _header.append("attnlib: tests/compile runs in a process of its own: make compile")


def pytest_collection_finish() -> None:
    """What was imported and collected lives to the end: the collector need not look through it again."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    """As pytest runs a test, but its Python frames lie in one piece: see `attnlib.emulator.frames`."""
    from attnlib.emulator.frames import in_one_piece

    run = item.config.pluginmanager.getplugin("runner").pytest_runtest_protocol
    return in_one_piece(run, item, nextitem)


def pytest_report_header() -> list[str]:
    return _header


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With -q pytest prints no header, so say it here: what did not run must not look as if it passed."""
    if terminalreporter.verbosity < 0:
        for line in _header:
            terminalreporter.write_line(line)
    if number := max(_left_out, default=chosen.left_out()):
        terminalreporter.write_line(
            f"attnlib: {number} cases that others stand for were NOT collected; every one: make every"
        )


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """A process of pytest-xdist ends, and leaves its count."""
    _left_out.append(getattr(node, "workeroutput", {}).get("left_out", 0))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Asked for tests/gpu alone without a GPU: nothing to do is no error, and the summary says so."""
    import torch

    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = chosen.left_out()
    only_gpu = all(str(arg).split("::")[0].rstrip("/").endswith("tests/gpu") for arg in session.config.args)
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and only_gpu and not torch.cuda.is_available():
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(scope="session", autouse=True)
def _poisoned_empty() -> object:
    """What torch.empty and its relatives return is NaN: skipping an element can't pass by luck."""
    from attnlib.bench.oracle import poisoned_empty

    with poisoned_empty():
        yield


@pytest.fixture(scope="session", autouse=True)
def _backward_in_cpp() -> None:
    """On a GPU no test runs while `node.cpp` is still being compiled."""
    import torch

    from attnlib import node

    if torch.cuda.is_available():
        node.wait()


@pytest.fixture
def device() -> str:
    """Where kernels run: "cuda", or "cpu" in the interpreter."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
