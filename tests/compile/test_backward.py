"""The portable backward kernels compiled for sm_90: what a gradient would run on an H100 or H200."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch
from chosen import more
from launches import jobs_of

from attnlib.bench import inspect_sm90
from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Stats
from attnlib.kernels import portable
from attnlib.kernels.common import preprocess
from attnlib.kernels.portable import backward_kernels as kernels
from attnlib.kernels.portable.configs_backward import backward_config
from attnlib.params import MaskWindow, Params, Varlen

WINDOWS = {"causal": MaskWindow(None, 0), "dense": MaskWindow(None, None), "window": MaskWindow(100, 20)}
LENGTHS = {"whole": (256, 256), "tail": (250, 250), "varlen": (250, 250)}
CASES = [
    *product((64, 128, 256), ("float16",), ("causal",), ("whole",)),  # its mask hides a tail
    (128, "bfloat16", "window", "varlen"),
    (256, "float16", "dense", "tail"),
    (64, "float32", "causal", "tail"),
]
OWN_VALUES = (192, 128)
"""Columns of queries and of values."""
CASES += [(OWN_VALUES, "float16", "causal", "whole")]
CASES += more(
    [
        *product((64, 128, 256), ("float16",), ("window",), ("varlen",)),
        (128, "bfloat16", "causal", "whole"),
        *product((64, 128), ("float16",), ("dense",), ("tail",)),
        *product((64, 128, 256), ("float16",), ("window",), ("tail",)),
        *product((128,), ("float16",), ("causal", "dense"), ("varlen",)),
        *product((128, 256), ("float32",), ("causal",), ("tail",)),
        (128, "float16", "dense", "whole"),
        (OWN_VALUES, "float16", "window", "varlen"),
    ]
)
SPILLS = {64: 16, 128: 40, 256: 70}
"""4-byte words of a thread that may spill. Dense calls, and at D = 64 all but varlen windows,
spill none, or 6 (dense, varlen, D = 256). With two query heads a key head, as here, a loop more holds
registers than with one."""
SPILLS_FLOAT32 = 1000  # exact products on the CUDA cores: a thread reads whole rows of both operands


def jobs(head_dim: int | tuple[int, int], dtype: str, mask: str, lengths: str) -> list[inspect_sm90.Job]:
    queries, keys = LENGTHS[lengths]
    head_dim, value_dim = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    q = torch.zeros(1, 2, queries, head_dim, dtype=getattr(torch, dtype))
    k = torch.zeros(1, 1, keys, head_dim, dtype=q.dtype)
    v, out = (torch.zeros(*x.shape[:-1], value_dim, dtype=q.dtype) for x in (k, q))
    lse = torch.zeros(1, 2, queries)
    varlen = None
    if lengths == "varlen":
        q, k, v, out = (x[0].transpose(0, 1) for x in (q, k, v, out))
        lse = lse[0]
        cu = torch.tensor([0, 100, queries], dtype=torch.int32)
        varlen = Varlen(cu, cu, 150, 150)
    config = backward_config(head_dim, dtype, (9, 0))
    params = Params(WINDOWS[mask], 0.1, varlen, config=config)
    return jobs_of((preprocess, kernels), lambda: portable.backward(out, q, k, v, out, lse, params))


@pytest.fixture(scope="module")
def compiled() -> dict[tuple, dict[str, Stats]]:
    """All at once: the compiler's start-up costs more than a kernel."""
    wanted = {case: jobs(*case) for case in CASES}
    flat = [job for found in wanted.values() for job in found]
    stats = iter(inspect_sm90.compile_all(flat))
    return {
        case: {f"{job.kernel_name}-{n}": next(stats) for n, job in enumerate(found)}
        for case, found in wanted.items()
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_compiles_well(compiled: dict[tuple, dict[str, Stats]], case: tuple) -> None:
    head_dim, dtype, mask, lengths = case
    head_dim = 256 if head_dim == OWN_VALUES else head_dim  # as wide a tile
    assert len(compiled[case]) == (4 if head_dim == 256 and dtype != "float32" else 3)
    for name, stats in compiled[case].items():
        print(f"{name}: {stats.registers} registers, {stats.spills} words spilled")
        free = mask == "dense" or (head_dim == 64 and lengths != "varlen")
        allowed = SPILLS_FLOAT32 if dtype == "float32" else 6 if free else SPILLS[head_dim]
        assert stats.spills <= allowed, name
        assert stats.warnings == (), f"{name}: wgmma serialized?"
        assert stats.shared_bytes <= SMEM_LIMIT and stats.ctas_per_sm > 0, name
        assert stats.opcodes.get("UTMALDG"), f"{name}: no TMA"
        assert not stats.opcodes.get("HMMA"), f"{name}: a product without the warpgroup instruction"
        products = "preprocess" not in name and dtype != "float32"
        assert bool(stats.opcodes.get("HGMMA")) == products, name
        assert not any(re.match("ATOM|RED(?!UX)", text) for text in stats.opcodes), f"{name}: atomics"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_loop_has_no_mask(compiled: dict[tuple, dict[str, Stats]], head_dim: int) -> None:
    """A mask is one select for each score of a thread; the loop with the fewest is the one without."""
    for name, stats in compiled[head_dim, "float16", "causal", "whole"].items():
        if "preprocess" not in name:
            selects = [loop.get("FSEL", 0) + loop.get("SEL", 0) for loop in stats.loops]
            exponentials = [loop["MUFU.EX2"] for loop in stats.loops]
            assert len(selects) == 2, name
            assert max(selects) >= exponentials[0] > 2 * min(selects), name
