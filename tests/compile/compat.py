"""What of the package another Triton compiles for sm_90, as a table: each kernel, in some cases.

`make compat` runs this with the versions of Triton that it names, each in an environment of its own. No GPU
is needed, and nothing is run.

    python tests/compile/compat.py
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "helpers"), str(HERE.parent / "gpu"), str(HERE.parents[1])]


class Family(NamedTuple):
    """compile: of a case, what the file of the family's tests has: numbers of a kernel, or jobs. gluon: the
    kernels are for the versions that `hopper_gpu` names; the others, for all that pyproject.toml allows."""

    name: str
    gluon: bool
    compile: Callable[[Any], Any]
    cases: list[tuple]


@dataclass(frozen=True)
class Outcome:
    """What became of a case. names: of its kernels; registers: of the one that has most; spills: in words, of
    all of them."""

    names: tuple[str, ...] = ()
    registers: int = 0
    spills: int = 0
    serialized: int = 0
    error: str | None = None


@cache
def families() -> list[Family]:
    import test_accumulate
    import test_add
    import test_backward
    import test_bsfa
    import test_decode
    import test_distr
    import test_entmax
    import test_fp8_forward
    import test_fp8_quantize
    import test_hopper
    import test_hopper_backward
    import test_monarch
    import test_pooled
    import test_production
    import test_sparse

    from attnlib.bench import inspect_sm90
    from attnlib.kernels.common.fp8 import Recipe

    def jobs(function: Callable) -> Callable[[tuple], Any]:
        return lambda case: function(*case)

    def fp8(case: tuple):
        role, scaling, *others = case
        return test_fp8_quantize.jobs(role, Recipe(scaling), *others)

    def add(case: tuple):
        return inspect_sm90.stats_of(*inspect_sm90.compile_source(test_add.source(*case), num_warps=4))

    return [
        Family("hopper forward", True, test_hopper.compile_case, [
            ("64", "causal", "fp16"), ("128", "causal", "bf16"), ("256", "dense", "fp16"),
            ("96", "varlen, all, LSE", "fp16"), ("192/128", "varlen, all, LSE", "fp16"),
        ]),
        Family("hopper merge", True, test_accumulate.compile_case, [("128", "causal", "fp32")]),
        Family("hopper pooled", True, test_pooled.compile_case, [("128", False)]),
        Family("hopper distr", True, test_distr.compile_product, [(128, 2, "128", True, True)]),
        Family("hopper fp8", True, test_fp8_forward.compile_case, [
            (128, "causal", "bf16"), (64, "varlen, all, LSE", "bf16"),
        ]),
        Family("hopper backward", True, test_hopper_backward.compile_case, [
            (64, "causal", "fp16"), (128, "varlen window", "fp16"), (256, "causal", "fp16"),
            (80, "causal", "fp16"), (64, "deterministic causal", "fp16"),
            (128, "deterministic causal", "fp16"),
            (128, "shared causal", "fp16"), (64, "turns bulk whole causal", "fp16"),
            (64, "turns bulk whole varlen", "fp16"), (128, "turns varlen", "fp16"),
            (192, "causal", "fp16"), (160, "varlen window", "fp16"),
            (192, "deterministic causal", "fp16"),
            ("192/128", "shared causal", "bf16"), ("64/256", "early causal", "fp16"),
            (96, "turns two loops tail", "fp16"),
        ]),
        Family("hopper backward, around", False, jobs(test_hopper_backward.passes_around), [
            (128, "fp16", True),
        ]),
        Family("hopper sparse", True, test_sparse.compile_case, [
            ("128", "bits", "fp16"), ("64 copied", "bits, LSE, half", "bf16"),
            (f"{test_sparse.TWO_Q}, ends", "bits, LSE", "fp16"), ("64 kept, ends", "bits, LSE", "fp16"),
        ]),
        Family("hopper sparse backward", True, test_sparse.compile_backward, [
            (64, False, "fp16"), (128, True, "fp16", "all"), (256, True, "fp16"),
            (128, True, "bf16", "gathered"), (128, True, "fp16", "bias"),
        ]),
        Family("hopper bias", True, test_sparse.compile_bias, [(128, "bias", True, "fp16")]),
        Family("hopper bsfa", True, test_bsfa.compile_hopper, [
            (128, "fp16", True, 0, False), (64, "bf16", True, 9, True),
        ]),
        Family("forward", False, jobs(test_production.job), [
            (64, "float16", "causal", "whole", ""), (128, "bfloat16", "causal", "varlen", "lse"),
            (256, "float16", "dense", "tail", "lse"), (128, "float32", "causal", "shifted", ""),
        ]),
        Family("backward", False, jobs(test_backward.jobs), [
            (64, "float16", "causal", "whole"), (128, "float16", "window", "varlen"),
        ]),
        Family("decode", False, jobs(test_decode.jobs), [
            (128, "float16", 4, "ragged", "stream_k"), (64, "bfloat16", 64, "paged", "stream_k", "fp8"),
        ]),
        Family("sparse", False, jobs(test_sparse.launched_with_sinks), [
            (128, "bfloat16", "bits", (9, 0)), (64, "float16", "score", (9, 0)),
        ]),
        Family("bsfa", False, jobs(test_bsfa.jobs), [(128, "bfloat16", True)]),
        Family("entmax", False, jobs(test_entmax.jobs), [(64, "bfloat16", 1.5, True)]),
        Family("monarch", False, jobs(test_monarch.jobs), [(64, "float16", 64, None, False)]),
        Family("distr", False, jobs(test_distr.jobs), [("blocks", 128, "bfloat16", True)]),
        Family("fp8", False, fp8, [
            ("q", "block", 128, "float16", True), ("v", "block", 128, "bfloat16", False),
            ("k", "tensor", 128, "float16", False),
        ]),
        Family("pool and lists", False, jobs(pool_and_lists), [()]),
        Family("add", False, add, [("bf16", 128)]),
    ]  # fmt: skip


def pool_and_lists() -> list:
    import torch
    from launches import jobs_of

    from attnlib.kernels import lists, pool
    from attnlib.kernels.lists import list_kernel
    from attnlib.kernels.pool import pool_kernels

    q, lse, maxima = torch.zeros(1, 2, 256, 64).half(), torch.zeros(1, 2, 256), torch.zeros(1, 2, 4, 256)

    def call() -> None:
        pool.of_scores(q, q, lse, True, 0.1)
        pool.of_maxima(maxima, lse, 256, True)
        lists.lists_of_chosen(torch.ones(1, 2, 4, 4, dtype=torch.bool), 256, 1, 64)

    return jobs_of((pool_kernels, list_kernel), call)


def attempt(number: int, case: tuple) -> Outcome:
    """Compile a case of a family; in a child process."""
    os.environ.pop("TRITON_INTERPRET", None)
    from attnlib.bench import inspect_sm90

    try:
        found = families()[number].compile(case)
        if isinstance(found, tuple):  # numbers, and what a test looks at besides
            found = found[0]
        found = found if isinstance(found, list) else [found]
        made = [inspect_sm90.compile_here(x) if isinstance(x, inspect_sm90.Job) else x for x in found]
    except Exception as error:
        return Outcome(error=reason(error))
    serialized = sum("serialized" in text for stats in made for text in stats.warnings)
    registers = max(stats.registers for stats in made)
    names, spills = tuple(stats.name for stats in made), sum(stats.spills for stats in made)
    return Outcome(names, registers, spills, serialized)


@cache
def launched() -> set[str]:
    """The package's kernels: they have arguments that Triton must not specialize, what they call has none."""
    from triton.runtime.jit import JITFunction

    from attnlib import kernels

    names = set()
    for module in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + "."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, JITFunction) and value.do_not_specialize:
                names.add(value.fn.__name__)
    return names


def reason(error: BaseException) -> str:
    """One line that says what is amiss: of a compilation error the innermost one, and where it is."""
    place = ""
    while error.__cause__ is not None:
        place = place or (re.match(r"at (\d+:\d+):", str(error)) or [""])[0].rstrip(":")
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[-1] if lines else ''}"
    return f"{text[:160]} ({place})" if place else text[:160]


def table(rows: Iterable[tuple[Family, tuple, Outcome]]) -> str:
    """A line for each case."""
    lines = []
    for family, case, o in rows:
        what = o.error
        if what is None:
            what = f"{len(o.names)} compiled, {o.registers:3d} registers, {o.spills:2d} words spilled"
            what += f", {o.serialized} products serialized" if o.serialized else ""
        label = " ".join(str(part) for part in case if part not in ("", None))
        lines.append(f"  {family.name:23s}  {label:42.42s}  {what}")
    return "\n".join(lines)


def main() -> int:
    """Status 1 if a case does not compile that has to, or a kernel has no case."""
    import triton
    from side_by_side import for_hopper

    from attnlib.kernels.common import hopper_gpu

    jobs = [(number, case) for number, family in enumerate(families()) for case in family.cases]
    children = min(8, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(children, multiprocessing.get_context("spawn"), for_hopper) as pool:
        outcomes = list(pool.map(attempt, *zip(*jobs, strict=True)))
    rows = [(families()[n], case, outcome) for (n, case), outcome in zip(jobs, outcomes, strict=True)]
    amiss = hopper_gpu._gluon_amiss()
    failed = [family.name for family, _, outcome in rows if outcome.error and not (family.gluon and amiss)]
    print(f"triton {triton.__version__}: {len(rows) - len(failed)} of {len(rows)} cases compile")
    print(table(rows), flush=True)
    if amiss:
        print(f"  the Hopper kernels are refused: {amiss}")
    untried = set() if failed or amiss else launched().difference(*(outcome.names for _, _, outcome in rows))
    if untried:
        print(f"  no case has {', '.join(sorted(untried))}")
    return int(bool(failed or untried))


if __name__ == "__main__":
    sys.exit(main())
