"""The forward kernels that merge into an existing result, compiled for sm_90: no spill in a loop, no product
made to wait, and an existing output that is read and written in as wide accesses as its layout allows."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import side_by_side
import torch
from chosen import with_more
from gluon_kernels import tile_types
from hopper_forward import compile_forward
from launches import jobs_of

from attnlib.bench import inspect_sm90
from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Stats
from attnlib.kernels import portable
from attnlib.kernels.hopper import launch
from attnlib.kernels.hopper.configs import M128N128, M192N128, M256N64, SPLIT, hopper_config
from attnlib.kernels.portable import forward_kernel as kernels
from attnlib.kernels.portable.configs import forward_config
from attnlib.params import Existing, Params, mask_window

CONFIGS = {
    "64": M256N64, "64 M192N128": M192N128, "64 M128N128": M128N128, "128": hopper_config(128),
    "256": hopper_config(256), **{str(width): config for width, config in SPLIT.items()},
}  # fmt: skip
MASKS = {
    "dense": {"causal": False, "shifted": False, "left": False, "blocks": 0, "skip": False},
    "causal": {"causal": True, "shifted": False, "left": False, "blocks": 1, "skip": False},
    "window": {"causal": True, "shifted": True, "left": True, "blocks": 2, "skip": True},
}
FIRST = [("128", "dense", "bf16"), ("256", "causal", "fp32")]
"""At D = 64 test_direct_launch compiles one."""
CASES = with_more(FIRST, product(CONFIGS, MASKS, ("fp32", "bf16")))
WORDS = {("64 M192N128", "dense"): 2, ("128", "dense"): 6, ("256", "dense"): 4, ("256", "causal"): 4}
"""Words that a thread stores and loads outside of the loops, once in a tile."""
ACCESSES = {"64": 64, "64 M192N128": 48, "64 M128N128": 32, "128": 64, "256": 128}
ACCESSES |= {"80": 60, "96": 72, "192": 96}
"""Of two columns each, in the code of all consumers."""


def compile_case(case: tuple[str, str, str]) -> Stats:
    """The compiled kernel in numbers."""
    name, kind, dtype = case
    width, config, mask = int(name.split()[0]), CONFIGS[name], MASKS[kind]
    plan = launch.make_plan(width, config, mask, flip=False, store_lse=True, varlen=False)
    windows = (((width,), (1,)),) * 3
    types = tile_types(launch.descriptors(windows, width, config, torch.bfloat16, False), "bf16")
    types |= {"into_ptr": f"*{dtype}"}
    options = {"into", *(name for name in ("left", "shifted") if mask[name])}
    return compile_forward(replace(plan, accumulate=width), types, options, config)


@pytest.fixture(scope="module")
def compiled() -> dict[tuple, Stats]:
    return dict(zip(CASES, side_by_side.run(compile_case, CASES), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_hopper(compiled: dict[tuple, Stats], case: tuple) -> None:
    stats, (name, kind, _) = compiled[case], case
    print(f"{case}: {stats.registers} registers, {stats.spills} words, {stats.shared_bytes} bytes")
    assert stats.spills == WORDS.get((name, kind), 0)
    loops = [loop for loop in stats.loops if loop.get("HGMMA")]
    assert loops and not any(loop.get("LDL") or loop.get("STL") for loop in loops)
    assert stats.registers == CONFIGS[name].max_registers
    assert stats.warnings == (), "wgmma serialized?"
    assert stats.opcodes.get("UTMALDG") and not stats.opcodes.get("UTMASTG")
    lses = 2 * CONFIGS[name].warpgroups  # of the two rows of a thread
    assert stats.opcodes["LDG"] == ACCESSES[name] + lses
    assert stats.opcodes["STG"] == ACCESSES[name] + lses + 1  # the counter of tiles
    assert stats.shared_bytes <= SMEM_LIMIT


SPILLS = {(256, "float32"): 128, (256, "bfloat16"): 128}
"""Words at most, outside of the loops: the accumulator and the existing output are 128 registers each."""
PORTABLE = with_more(
    [(128, "bfloat16"), (256, "float32")],
    [(64, "float32"), *product((128, 256), ("float32", "bfloat16"))],
)


def job(head_dim: int, dtype: str) -> inspect_sm90.Job:
    q = torch.zeros(1, 2, 256, head_dim, dtype=torch.bfloat16)
    into = Existing(torch.zeros(q.shape, dtype=getattr(torch, dtype)), torch.zeros(q.shape[:3]))
    config = forward_config(head_dim, "bfloat16", (9, 0), 1 << 20)
    params = Params(mask_window(False, None), 0.1, return_lse=True, config=config, into=into)
    [found] = jobs_of(kernels, lambda: portable.forward(q, q, q, params))
    return found


@pytest.fixture(scope="module")
def portables() -> dict[tuple, Stats]:
    return dict(zip(PORTABLE, inspect_sm90.compile_all([job(*case) for case in PORTABLE]), strict=True))


@pytest.mark.parametrize("case", PORTABLE, ids=str)
def test_portable(portables: dict[tuple, Stats], case: tuple) -> None:
    stats = portables[case]
    print(f"{case}: {stats.registers} registers, {stats.spills} words, {stats.shared_bytes} bytes")
    assert stats.spills <= SPILLS.get(case, 0) and stats.shared_bytes <= SMEM_LIMIT
    loops = [loop for loop in stats.loops if loop.get("HGMMA")]
    assert loops and not any(loop.get("LDL") or loop.get("STL") for loop in loops)
    assert stats.warnings == (), "wgmma serialized?"
