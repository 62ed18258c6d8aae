"""The Hopper kernel compiled for sm_90 in every configuration: what `attention` runs on an H100 or H200."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import product

import pytest

from attnlib import inspect_sm90, launch_hopper
from attnlib.configs import hopper_config
from attnlib.inspect_sm90 import SMEM_LIMIT, Stats

# What a call asks for: causal, blocks to mask, rows of a tile end in different blocks (None: where a tile is
# not as tall as a block is wide), negative scale, LSE.
KINDS = {
    "causal": (True, 1, None, False, False),
    "causal, LSE": (True, 1, None, False, True),
    "causal, negative": (True, 1, None, True, False),
    "shifted": (True, 2, True, False, False),
    "shifted, LSE": (True, 2, True, False, True),
    "shifted, negative, LSE": (True, 2, True, True, True),
    "dense": (False, 0, False, False, False),
    "dense, LSE": (False, 0, False, False, True),
    "tail": (False, 1, False, False, False),
    "tail, LSE": (False, 1, False, False, True),
    "idle": (False, 0, True, False, False),  # warpgroups of the last tile that have no rows
    "idle, tail, LSE": (False, 1, True, False, True),
}
BFLOAT16 = ("causal", "shifted, LSE", "dense")  # as many registers, other conversions
CONFIGS = {
    "64": hopper_config(64),
    "64 few rows": hopper_config(64, rows=1),
    "128": hopper_config(128),
    "256": hopper_config(256),
}
CASES = list(product(CONFIGS, KINDS, ("fp16",))) + list(product(CONFIGS, BFLOAT16, ("bf16",)))
HGMMA = {"64": 64, "64 few rows": 48, "128": 64, "256": 80}
"""Products in the code of all consumers: first block, loop, last values."""
SPILLS_SHIFTED = {"64": 4, "64 few rows": 0, "128": 0, "256": 4}
"""32-bit words of a thread that may spill where the diagonal misses the corners of the blocks: the mask in
the loop needs a few values more, and the registers are full. All other calls have none."""


def compile_case(case: tuple[str, str, str]) -> Stats:
    """In a child process, so that cases share the cores."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from attnlib.kernels.hopper import Plan, attention_forward_hopper

    name, kind, dtype = case
    width, config = int(name.split()[0]), CONFIGS[name]
    causal, masked, skip, flip, lse = KINDS[kind]
    if skip is None:
        skip = config.block_n != 64 * config.warpgroups
    plan = launch_hopper.make_plan(Plan, width, causal, masked, skip, flip, lse, config)
    element = {"fp16": gl.float16, "bf16": gl.bfloat16}[dtype]
    types = {"counter_ptr": "*i32", "qk_scale": "fp32", "lse_ptr": "*fp32" if lse else "constexpr"}
    for tensor, block in zip("qkvo", launch_hopper.blocks(width, config), strict=True):
        layout = gl.NVMMASharedLayout.get_default_for(block, element)
        types[f"desc_{tensor}"] = f"tensordesc<{dtype}{block},{layout!r}>"
    names = attention_forward_hopper.arg_names
    signature = {name: types.get(name, "i32") for name in names} | {"plan": "constexpr"}
    constants = {(names.index("plan"),): plan} | ({} if lse else {(names.index("lse_ptr"),): None})
    divisible = {(names.index("counter_ptr"),): [["tt.divisibility", 16]]}
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(
            GluonASTSource(attention_forward_hopper, signature, constants, divisible),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": 4, "maxnreg": config.max_registers},
        )
    return inspect_sm90.stats_of(compiled, log.getvalue())


@pytest.fixture(scope="module")
def compiled() -> dict[tuple, Stats]:
    children = min(8, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(children, multiprocessing.get_context("spawn")) as pool:
        return dict(zip(CASES, pool.map(compile_case, CASES), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_configuration(compiled: dict[tuple, Stats], case: tuple) -> None:
    stats, (name, kind, _) = compiled[case], case
    print(f"{case}: {stats.registers} registers, {stats.spills} words, {stats.shared_bytes} bytes")
    assert stats.opcodes["HGMMA"] == HGMMA[name] and not stats.opcodes.get("HMMA")
    assert stats.opcodes.get("UTMALDG") and stats.opcodes.get("UTMASTG"), "no TMA"
    assert stats.opcodes.get("USETMAXREG"), "registers are not shared out anew"
    assert stats.spills <= (SPILLS_SHIFTED[name] if "shifted" in kind else 0)
    assert stats.warnings == (), "wgmma serialized?"
    assert stats.shared_bytes <= SMEM_LIMIT


def test_the_program_fits_its_registers(compiled: dict[tuple, Stats]) -> None:
    """At the start all warps have max_registers; afterwards the consumers get what the producer gives up."""
    for name, config in CONFIGS.items():
        assert compiled[name, "causal", "fp16"].registers == config.max_registers
        warpgroups = config.warpgroups + 1
        assert 128 * warpgroups * config.max_registers <= 65536
        later = config.warpgroups * config.consumer_registers + config.producer_registers
        assert later <= warpgroups * config.max_registers
