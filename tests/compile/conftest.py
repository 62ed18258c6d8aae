"""Where tests/compile compiles: in the process of the test, unless it has cores for more."""

from __future__ import annotations

import traceback

import pytest
import side_by_side
from triton import knobs

from attnlib.bench import inspect_sm90
from attnlib.kernels.common import device

LONG = {
    f"test_{name}.py" for name in ("changed_kernels", "sparse", "ladder", "hopper_backward", "exponentials")
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first: none of them is at work last and alone."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(scope="session", autouse=True)
def _compile_here():
    """For a Hopper GPU, whose launches overlap. `compile_all` starts a child since its caller may be in the
    interpreter. No test here is, and a child spends as long on its imports as on two kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "overlaps", lambda index: True)
        if side_by_side.cores() < 2:
            patch.setattr(inspect_sm90, "_compile_in_children", compile_in_this_process)
        yield


def compile_in_this_process(jobs: list[inspect_sm90.Job]) -> None:
    compiled: list[bool] = []
    try:
        with knobs.compilation.scope(), knobs.nvidia.scope():
            inspect_sm90.compile_into_cache(jobs, lambda: compiled.append(True))
    except Exception as error:
        name = jobs[min(len(compiled), len(jobs) - 1)].kernel_name
        said = inspect_sm90.last_lines("".join(traceback.format_exception(error)))
        raise RuntimeError(f"compiling {name} for sm_90 failed:\n{said}") from error
