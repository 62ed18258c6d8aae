"""The BSFA kernels compiled for sm_90: what calls of `attention_bsfa` would run on an H100 or H200."""

from __future__ import annotations

import pytest
import side_by_side
import torch
from chosen import more
from gluon_kernels import compile_kernel, tile_types
from launches import jobs_of

from attnlib.bench import inspect_sm90
from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Job, Stats
from attnlib.kernels.bsfa import forward_kernel, launch, launch_hopper
from attnlib.kernels.bsfa.configs import hopper_bsfa_config
from attnlib.params import BsfaParams

# Head dimension, dtype, causal.
CASES = [(64, "float16", False), (128, "bfloat16", True)]


def jobs(head_dim: int, dtype: str, causal: bool) -> list[Job]:
    """The portable kernels of a call that asks for everything, and of its thresholds."""
    q = torch.zeros(1, 2, 256, head_dim, dtype=getattr(torch, dtype))
    params = BsfaParams(torch.zeros(1, 2, 4), causal, 0.1, True, True)

    def call() -> None:
        launch.forward(q, q, q, params)
        launch.maxima(q, q, params)

    launch.prepare.cache_clear()
    launch.prepare_maxima.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.device, "interpreted", lambda: False)
        return jobs_of(forward_kernel, call)


@pytest.fixture(scope="module")
def compiled() -> dict[tuple, list[tuple[Job, Stats]]]:
    """All at once, as the compiler's start-up costs more than a kernel."""
    found = {case: jobs(*case) for case in CASES}
    stats = iter(inspect_sm90.compile_all([job for of_case in found.values() for job in of_case]))
    return {case: [(job, next(stats)) for job in of_case] for case, of_case in found.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_portable(compiled: dict[tuple, list[tuple[Job, Stats]]], case: tuple) -> None:
    names = [job.kernel_name for job, _ in compiled[case]]
    assert names == ["attention_bsfa_forward", "block_maxima"]
    for _, stats in compiled[case]:
        assert stats.spills == 0
        assert stats.shared_bytes <= SMEM_LIMIT and stats.ctas_per_sm > 0
        assert stats.opcodes.get("HGMMA"), "no tensor cores"
        assert not any("serialized" in warning for warning in stats.warnings)


# Head dimension, dtype, causal, keys beyond the queries, whether LSE and kept blocks are asked for.
HOPPER = [(64, "bf16", False, 30, True), (128, "fp16", True, 0, False)]
HOPPER += more([(128, "bf16", True, 30, False), (64, "fp16", True, 0, True), (64, "bf16", True, 9, True)])
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def compile_hopper(case: tuple) -> Stats:
    """The compiled kernel in numbers."""
    from attnlib.kernels.bsfa.hopper_kernel import attention_bsfa_forward_hopper as kernel

    head_dim, dtype, causal, more, all_of_it = case
    q, k = torch.zeros(1, 2, 256, head_dim, dtype=DTYPES[dtype]), torch.zeros(1, 2, 256 + more, head_dim)
    config = hopper_bsfa_config(head_dim)
    params = BsfaParams(torch.zeros(1, 2, 4), causal, 0.1, all_of_it, all_of_it, config)
    call = launch.call_of(q, k, params, q, k, k)
    plan = launch_hopper.make_plan(call, params.return_kept)
    absent = [] if all_of_it else ["lse_ptr", "kept_ptr"]
    types = {"lse_ptr": "*fp32", "kept_ptr": "*u8", "limit_ptr": "*fp32", "counter_ptr": "*i32"}
    pointers = [name for name in types if name not in absent]
    types["qk_scale"] = "fp32"
    types |= tile_types(launch_hopper.descriptors((None,) * 4, call), dtype)
    return compile_kernel(kernel, plan, types, absent, pointers, config.max_registers)[0]


@pytest.fixture(scope="module")
def hopper() -> dict[tuple, Stats]:
    return dict(zip(HOPPER, side_by_side.run(compile_hopper, HOPPER), strict=True))


@pytest.mark.parametrize("case", HOPPER, ids=lambda case: "-".join(map(str, case)))
def test_hopper(hopper: dict[tuple, Stats], case: tuple) -> None:
    stats = hopper[case]
    assert stats.spills == 0
    assert stats.warnings == (), "products one after the other"
    assert stats.shared_bytes <= SMEM_LIMIT
    votes = sum("BAR.RED.OR" in text for text in stats.listing)
    assert votes == 4, "one for each kind of step and each consumer"
    for loop in stats.loops:
        assert not loop.get("LDS"), "a decision through shared memory"
        assert not loop.get("R2UR"), "a decision that ptxas does not know for one of a whole warp"
