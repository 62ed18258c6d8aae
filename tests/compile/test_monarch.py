"""The Monarch kernels compiled for sm_90: what calls of `attention_monarch` would run on an H100 or H200."""

from __future__ import annotations

import pytest
import torch
from chosen import more
from launches import jobs_of

from attnlib.bench import inspect_sm90
from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Job, Stats
from attnlib.kernels import monarch
from attnlib.kernels.common import device
from attnlib.kernels.monarch import monarch_kernels
from attnlib.params import MonarchParams

# Head dimension, dtype, block, tokens, whether there is a key mask.
CASES = [
    (64, "float16", 64, None, False), (256, "bfloat16", 45, 2048, True), (64, "float32", 64, None, False),
]  # fmt: skip
CASES += more([(64, "bfloat16", 45, 2048, True), (256, "float16", 64, None, False)])
CASES += more([(64, "float16", block, None, False) for block in (16, 128, 256)])
CASES += more([(128, "bfloat16", 128, None, False), (256, "float32", 64, None, False)])


def jobs(head_dim: int, dtype: str, block: int, tokens: int | None, masked: bool) -> list[Job]:
    """The kernels of two rounds on an H200, with as many blocks as a block has tokens unless told."""
    tokens = tokens or block * block
    x = torch.zeros(1, dtype=getattr(torch, dtype)).expand(1, 1, tokens, head_dim).contiguous()
    mask = torch.ones(1, tokens, dtype=torch.bool) if masked else None
    params = MonarchParams(block, 2, 0, 0.1, mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "overlaps", lambda index: True)
        patch.setattr(device, "interpreted", lambda: False)
        return jobs_of(monarch_kernels, lambda: monarch.forward(x, x, x, params))


def name(case: tuple) -> str:
    return "-".join(str(part) for part in case)


@pytest.fixture(scope="module")
def compiled() -> dict[tuple, list[tuple[Job, Stats]]]:
    """All at once: the compiler's start-up costs more than a kernel."""
    found = {case: jobs(*case) for case in CASES}
    stats = iter(inspect_sm90.compile_all([job for of_case in found.values() for job in of_case]))
    return {case: [(job, next(stats)) for job in of_case] for case, of_case in found.items()}


@pytest.mark.parametrize("case", CASES, ids=name)
def test_compiled(compiled: dict[tuple, list[tuple[Job, Stats]]], case: tuple) -> None:
    head_dim, dtype, block, *_ = case
    kernels = [job.kernel_name for job, _ in compiled[case]]
    whole = ["r_step", "center_step", "r_step", "l_step"]
    assert kernels in (whole, ["r_step", "l_step", *whole[1:]]), "launches of two rounds"
    for job, stats in compiled[case]:
        assert stats.spills == 0 and stats.warnings == ()
        assert stats.shared_bytes <= SMEM_LIMIT and stats.ctas_per_sm > 0
        if dtype == "float32":
            tensor_cores = stats.opcodes.get("HGMMA") or stats.opcodes.get("HMMA")
            assert not tensor_cores, "products rounded to TF32"
        else:
            wgmma = job.constexprs["ROWS"] >= 64
            assert stats.opcodes.get("HGMMA" if wgmma else "HMMA"), "no tensor cores"
            loads = [line for line in stats.listing if "LDG.E" in line or "LDGSTS" in line]
            assert any(".128" in line for line in loads), "rows in pieces"


def test_programs_share_an_sm(compiled: dict[tuple, list[tuple[Job, Stats]]]) -> None:
    """What hides the waits of a program that loads one tile, works on it and stores it: the others."""
    least = {16: 8, 64: 4, 128: 3}
    for head_dim, dtype, block, *_ in CASES:
        if (head_dim, dtype) == (64, "float16") and block in least:
            for job, stats in compiled[64, "float16", block, None, False]:
                if job.kernel_name != "center_step":
                    assert stats.ctas_per_sm >= least[block], job.kernel_name
