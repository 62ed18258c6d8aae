"""The kernels of chapter 20 compiled for sm_90, as its launcher does."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from chosen import with_more
from launches import jobs_of

from attnlib.bench import inspect_sm90, sources
from attnlib.bench.inspect_sm90 import SMEM_LIMIT
from attnlib.bench.paths import NOTEBOOKS

NOTEBOOK = NOTEBOOKS / "20_backward.ipynb"
CASES = with_more(
    [*product((64, 128, 256), ("ONE_PASS", "PASSES"), (True,)), (64, "PASSES", False)],
    product((64, 128, 256), ("ONE_PASS", "PASSES"), (False,)),
)
"""The causal ones are those that the chapter compiles."""
SPILLS = {(128, "ONE_PASS"), (256, "ONE_PASS"), (256, "PASSES")}
"""Where the accumulators do not fit the registers, which the chapter says and measures."""
MMA_SYNC = {(256, "ONE_PASS")}
"""Where dQ's tile has 32 rows: wgmma begins at 64, so Triton makes that product of mma.sync."""


def jobs(head_dim: int, way: str, causal: bool) -> list:
    module = sources.load_source("20_backward", sources.kernel_source(NOTEBOOK))
    q = torch.zeros(1, 1, 4096, head_dim, dtype=torch.float16)
    steps, _ = module.launches(
        q, q, q, q, q, torch.zeros(1, 1, 4096), causal, 0.1, getattr(module, way)[head_dim]
    )
    return jobs_of(module, lambda: [launch() for _, launch in steps])


@pytest.fixture(scope="module")
def compiled() -> dict[tuple, list[tuple[inspect_sm90.Job, inspect_sm90.Stats]]]:
    """All of them in one child process."""
    launched = {case: jobs(*case) for case in CASES}
    found = iter(inspect_sm90.compile_all([job for each in launched.values() for job in each]))
    return {case: [(job, next(found)) for job in each] for case, each in launched.items()}


@pytest.mark.parametrize(("head_dim", "way", "causal"), CASES)
def test_kernels(compiled, head_dim: int, way: str, causal: bool) -> None:
    launched = compiled[head_dim, way, causal]
    assert launched[0][0].kernel_name == "row_delta" and len(launched) in (2, 3, 4)
    for job, stats in launched:
        assert stats.shared_bytes <= SMEM_LIMIT and stats.ctas_per_sm > 0, f"{job.kernel_name}: does not fit"
        if job.kernel_name == "row_delta":
            continue
        name = job.kernel_name
        assert stats.opcodes.get("HGMMA"), f"{name}: wgmma"
        assert bool(stats.opcodes.get("HMMA")) == ((head_dim, way) in MMA_SYNC), f"{name}: mma.sync"
        assert stats.spills <= 8 or (head_dim, way) in SPILLS, f"{name}: {stats.spills} words spilled"
        assert stats.warnings == (), f"{name}: wgmma serialized?"
        assert bool(stats.opcodes.get("REDG")) == (way == "ONE_PASS"), f"{name}: atomics"
