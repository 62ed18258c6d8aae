"""The entmax kernels compiled for sm_90: what calls of `attention_entmax` would run on an H100 or H200."""

from __future__ import annotations

import pytest
import torch
from chosen import more
from launches import jobs_of

from attnlib.bench import inspect_sm90
from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Job, Stats
from attnlib.kernels.entmax import backward_kernels, forward_kernel, launch, launch_backward, list_kernels
from attnlib.params import EntmaxParams, Varlen

# Head dimension, dtype, alpha, causal, varlen. 96: padded.
HALF = [(64, "bfloat16", 1.5, True), (256, "float16", 1.5, True, "varlen")]
HALF += more([(256, "bfloat16", 1.5, True), (64, "bfloat16", 1.5, True, "varlen")])
HALF += more([(96, "float16", 1.25, False)])
FULL = [(64, "float32", 1.5, True)]
KERNELS = ["entmax_bound", "entmax_flags", "entmax_lists", "attention_entmax_forward"]
KERNELS += ["entmax_lists", "attention_entmax_dq", "entmax_lists", "attention_entmax_dkdv"]
GATHERING = [name for name in KERNELS if name.startswith("attention")]


def jobs(head_dim: int, dtype: str, alpha: float, causal: bool, varlen: str = "") -> list[Job]:
    """The kernels that a call and its backward pass would launch."""
    q = torch.zeros(1, 2, 256, head_dim, dtype=getattr(torch, dtype))
    params = EntmaxParams(alpha, causal, 0.1, True)
    if varlen:
        offsets = torch.tensor([0, 100, 256], dtype=torch.int32)
        params = params._replace(varlen=Varlen(offsets, offsets, 156, 156))
        q = q[0].transpose(0, 1).contiguous()

    def call() -> None:
        out, tau, flags = launch.forward(q, q, q, params)
        launch_backward.backward(q, q, q, q, out, tau, flags, params)

    launch.prepare.cache_clear()
    launch_backward.prepare.cache_clear()
    return jobs_of((list_kernels, forward_kernel, backward_kernels), call)


def name(case: tuple) -> str:
    return "-".join(str(part) for part in case)


@pytest.fixture(scope="module")
def compiled() -> dict[tuple, list[tuple[Job, Stats]]]:
    """All at once, as the compiler's start-up costs more than a kernel; what cases share, once."""
    found = {case: jobs(*case) for case in HALF + FULL}
    known = {job.key(): job for of_case in found.values() for job in of_case}
    stats = dict(zip(known, inspect_sm90.compile_all(list(known.values())), strict=True))
    return {case: [(job, stats[job.key()]) for job in of_case] for case, of_case in found.items()}


@pytest.mark.parametrize("case", HALF + FULL, ids=name)
def test_kernels(compiled, case: tuple) -> None:
    names = [job.kernel_name for job, _ in compiled[case]]
    assert names == KERNELS + ["attention_entmax_dkdv"] * (case[0] == 256)
    for _, stats in compiled[case]:
        assert stats.spills == 0
        assert stats.shared_bytes <= SMEM_LIMIT and stats.ctas_per_sm > 0


@pytest.mark.parametrize("case", HALF, ids=name)
def test_half_precision(compiled, case: tuple) -> None:
    for job, stats in compiled[case]:
        if job.kernel_name == "entmax_lists":
            continue
        assert stats.opcodes.get("HGMMA"), "no tensor cores"
        assert not any("serialized" in warning for warning in stats.warnings)
        if job.kernel_name in GATHERING:
            copies = [text for text in stats.listing if "LDGSTS" in text and "BYPASS.128" in text]
            assert copies, "rows are gathered in pieces of less than 16 bytes, or through registers"


@pytest.mark.parametrize("case", FULL, ids=name)
def test_float32(compiled, case: tuple) -> None:
    """Exact products: no tensor core has them in float32."""
    for _, stats in compiled[case]:
        assert not stats.opcodes.get("HGMMA") and not stats.opcodes.get("HMMA"), "products rounded to TF32"


def test_the_bound_costs_one_maximum_a_score(compiled) -> None:
    """A tile of 64 x 64 scores is 32 for each of 128 threads."""
    (stats,) = (x for job, x in compiled[HALF[0]] if job.kernel_name == "entmax_bound")
    unmasked = min(stats.loops, key=lambda loop: sum(loop.values()))
    assert unmasked["FMNMX"] == 32
    assert sum(unmasked.values()) < 110
