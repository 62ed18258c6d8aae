"""Which configurations of the production kernels another Triton compiles for sm_90, as a table.

`make compat` runs this with the versions of Triton that it names, each in an environment of its own. No GPU
is needed, and nothing is run: a kernel that compiles has yet to be tested on one.

    python tests/compile/compat.py
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from attnlib.kernels.portable.configs import SHORT  # noqa: E402

HEAD_DIMS = (64, 128, 256)
KINDS = [("causal", "whole", ""), ("causal", "shifted", "lse"), ("dense", "tail", "lse")]


@dataclass(frozen=True)
class Outcome:
    """What became of one configuration: `error` is None where it compiled."""

    kernel: str
    configuration: str
    registers: int | None = None
    spills: int | None = None
    error: str | None = None


def portable_cases() -> list[tuple]:
    half = product(HEAD_DIMS, ("float16", "bfloat16"), KINDS)
    full = product(HEAD_DIMS, ("float32",), KINDS[:1] + KINDS[2:])
    few = [(head_dim, "float16", *kind, 0.1, SHORT) for head_dim in HEAD_DIMS[1:] for kind in KINDS]
    return [(head_dim, dtype, *kind) for head_dim, dtype, kind in (*half, *full)] + few


def attempt(kernel: str, case: tuple) -> Outcome:
    """Compile one case of test_production or test_hopper; in a child process."""
    os.environ.pop("TRITON_INTERPRET", None)
    label = " ".join(str(part) for part in case if part)
    try:
        if kernel == "portable":
            import test_production

            from attnlib.bench import inspect_sm90

            stats = inspect_sm90.compile_here(test_production.job(*case))
        else:
            import test_hopper

            stats = test_hopper.compile_case(case)
    except Exception as error:
        return Outcome(kernel, label, error=reason(error))
    return Outcome(kernel, label, stats.registers, stats.spills)


def reason(error: BaseException) -> str:
    """One line that says what is amiss: of a compilation error the innermost one, and where it is."""
    place = ""
    while error.__cause__ is not None:
        place = place or (re.match(r"at (\d+:\d+):", str(error)) or [""])[0].rstrip(":")
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[-1] if lines else ''}"
    return f"{text[:160]} ({place})" if place else text[:160]


def format_outcomes(version: str, outcomes: list[Outcome]) -> str:
    """A line for each configuration, and how many of each kernel compile."""
    width = max(len(outcome.configuration) for outcome in outcomes)
    lines = [f"triton {version}"]
    for o in outcomes:
        what = o.error or f"{o.registers} registers, {o.spills} words spilled"
        lines.append(f"  {o.kernel:8s}  {o.configuration:{width}s}  {what}")
    for kernel in dict.fromkeys(o.kernel for o in outcomes):
        errors = [o.error for o in outcomes if o.kernel == kernel]
        lines.append(f"  {kernel}: {errors.count(None)} of {len(errors)} configurations compile")
    return "\n".join(lines)


def main() -> int:
    """Status 1 if a configuration of the portable kernel does not compile: it has to, with every Triton that
    pyproject.toml allows, while the Hopper kernel is for the one that `hopper_gpu` names."""
    import test_hopper
    import triton

    jobs = [("portable", case) for case in portable_cases()] + [("hopper", c) for c in test_hopper.CASES]
    children = min(8, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(children, multiprocessing.get_context("spawn")) as pool:
        outcomes = list(pool.map(attempt, *zip(*jobs, strict=True)))
    print(format_outcomes(triton.__version__, outcomes), flush=True)
    return int(any(outcome.error for outcome in outcomes if outcome.kernel == "portable"))


if __name__ == "__main__":
    sys.exit(main())
