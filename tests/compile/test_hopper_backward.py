"""The Hopper backward kernel compiled for sm_90 in every configuration, and what makes dQ of its sums."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import product

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from attnlib.bench import inspect_sm90
from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Job, Stats
from attnlib.kernels.hopper import backward_kernel as kernels
from attnlib.kernels.hopper import launch_backward as launch_hopper_backward
from attnlib.kernels.hopper.configs_backward import hopper_backward_config
from attnlib.kernels.portable import launch_backward
from attnlib.kernels.portable.launch import Lengths

KINDS = {
    "causal": (True, False),
    "dense": (False, False),
    "tail": (False, True),
    "window": (True, False, False, True),
    "both sides": (True, True, True, True),
    "packed": (True, False, False, False, True),
    "packed dense": (False, True, False, False, True),
    "packed window": (True, True, True, True, True),
}
"""What a plan calls causal, tail, shifted, left, packed."""
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
WIDTHS = 64, 128, 256
CASES = list(product(WIDTHS, KINDS, ["fp16"])) + list(product(WIDTHS, ["causal"], ["bf16"]))
PLANTED = "dQ of every step goes to one block"

IN_A_STEP = {64: [32, 32], 128: [32, 32], 256: [8, 24, 24]}
"""Products of each consumer in a step, sorted; at D = 256 one for dQ, one for P and dV, one for dS and dK."""
AROUND = {64: 2 * (4 + 8), 128: 2 * (8 + 8), 256: 16 + 16}
"""Products around the loops: the first S, and dQ of the last block; at D = 256 the first S and dP."""
EX2 = {64: [64, 64], 128: [32, 32], 256: [0, 0, 32]}
"""Exponentials of a thread in a step, sorted."""
ADDITIONS = {64: [8, 8], 128: [8, 8], 256: [0, 0, 32]}
"""Of 16 bytes, likewise."""
SPILLS = {
    64: (10, 6, 8, 10, 12, 12, 4, 12),
    128: (6, 0, 0, 12, 4, 6, 4, 4),
    256: (2, 0, 0, 6, 6, 8, 10, 8),
}
"""32-bit words of a thread that may spill, kind by kind: addresses and counters; the registers are full of
accumulators."""
LOADS = {64: 10, 128: 9, 256: 1}
"""Loads of such words that the code of a step may have, those in the branch with the mask included."""


@gluon.jit
def _one_block(block, m, m_start, gap):
    return m_start


def compile_case(case: tuple[int, str, str], planted: bool = False) -> tuple[Stats, list[bool]]:
    """In a child process, so that cases share the cores: the compiled kernel in numbers, and for each place
    in a loop that adds to dQ whether its address changes from step to step."""
    if planted:
        kernels._before = _one_block
    width, kind, dtype = case
    config = hopper_backward_config(width)
    causal, tail, *asked = KINDS[kind]
    packed = len(asked) == 3 and asked[2]
    plan, kernel = launch_hopper_backward.kernel_for(width, causal, tail, config, *asked)
    types = {"dq_ptr": "*fp32", "qk_scale": "fp32", "sm_scale": "fp32"}
    blocks = launch_hopper_backward.blocks_of(width, config, packed)
    for tensor, block in zip(("q", "k", "v", "do", "dk", "dv", "rows"), blocks, strict=True):
        layout = launch_hopper_backward.shared_layout(gl, block, DTYPES[dtype])
        held = "fp32" if tensor == "rows" else dtype
        types[f"desc_{tensor}"] = f"tensordesc<{held}{block},{layout!r}>"
    names = kernel.arg_names
    signature = {name: types.get(name, "i32") for name in names} | {"plan": "constexpr"}
    asked += [False] * (3 - len(asked))
    for wanted, given in zip(asked, (("right",), ("left",), ("cu_q", "cu_k", "B")), strict=True):
        kinds = {name: "*i32" if name.startswith("cu") else "i32" for name in given}
        signature |= kinds if wanted else dict.fromkeys(given, "constexpr")
    constants = {(i,): None for i, name in enumerate(names) if signature[name] == "constexpr"}
    constants[(names.index("plan"),)] = plan
    divisible = {(names.index("dq_ptr"),): [["tt.divisibility", 16]]}
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(
            GluonASTSource(kernel, signature, constants, divisible),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": 4, "maxnreg": config.max_registers},
        )
    return inspect_sm90.stats_of(compiled, log.getvalue()), addresses_change(compiled.asm["ttgir"])


def addresses_change(ttgir: str) -> list[bool]:
    """For each addition to memory in a loop: whether its address depends on a variable of the loop."""
    lines, found = ttgir.splitlines(), []
    for number, line in enumerate(lines):
        # A loop and what is in it are indented, and end with a brace where the loop begins.
        if "scf.for" not in line:
            continue
        indent = len(line) - len(line.lstrip())
        end = next(i for i in range(number + 1, len(lines)) if lines[i].startswith(" " * indent + "}"))
        carried = set(re.findall(r"scf\.for (%[\w$.-]+) =", line))
        carried |= set(re.findall(r"(%[\w$.-]+) = %", line.partition("iter_args(")[2]))
        for place in range(number + 1, end):
            if "red.global.add" in lines[place]:
                address = re.findall(r"%[\w$.-]+", lines[place].rpartition('" {')[2])[1]
                found.append(_depends(address, carried, lines[number + 1 : place]))
    return found


def _depends(value: str, carried: set[str], before: list[str]) -> bool:
    wanted = {value}
    for line in reversed(before):
        result, _, operation = line.partition(" = ")
        if result.strip().split(":")[0] in wanted:
            wanted |= set(re.findall(r"%[\w$.-]+", re.sub(r'"[^"]*"', "", operation)))
    return bool(wanted & carried)


@pytest.fixture(scope="module")
def compiled() -> dict[object, tuple[Stats, list[bool]]]:
    jobs = [(case, False) for case in CASES] + [((128, "causal", "fp16"), True)]
    children = min(8, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(children, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(compile_case, *zip(*jobs, strict=True)))
    return dict(zip([*CASES, PLANTED], found, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_configuration(compiled, case: tuple[int, str, str]) -> None:
    (stats, changes), (width, kind, _) = compiled[case], case
    print(f"{case}: {stats.registers} registers, {stats.spills} words, {stats.shared_bytes} bytes")
    assert stats.warnings == (), "wgmma serialized?"
    assert stats.opcodes["HGMMA"] == sum(IN_A_STEP[width]) + AROUND[width] and not stats.opcodes.get("HMMA")
    assert stats.opcodes.get("UTMALDG") and stats.opcodes.get("UTMASTG"), "no TMA"
    assert stats.opcodes.get("USETMAXREG"), "registers are not shared out anew"
    assert stats.shared_bytes <= SMEM_LIMIT
    assert stats.spills <= SPILLS[width][list(KINDS).index(kind)]
    loops = stats.loops  # one for each consumer
    assert sorted(loop["HGMMA"] for loop in loops) == IN_A_STEP[width]
    assert sorted(loop.get("MUFU.EX2", 0) for loop in loops) == EX2[width]
    assert sorted(loop.get("REDG", 0) for loop in loops) == ADDITIONS[width], "16 bytes at a time"
    for loop in loops:
        assert loop.get("LDL", 0) <= LOADS[width]
        assert not any(text.startswith(("ATOM", "LDG", "STG")) for text in loop)
    assert changes == [True, True], "two places add to dQ"


def test_an_address_that_does_not_change_is_found(compiled) -> None:
    assert compiled[PLANTED][1] == [False, False]


def test_the_program_fits_its_registers(compiled) -> None:
    """At the start all warps have max_registers; afterwards the consumers get what the producer gives up."""
    for width in (64, 128):
        config = hopper_backward_config(width)
        assert compiled[width, "causal", "fp16"][0].registers == config.max_registers
        assert 3 * 128 * config.max_registers <= 65536
        assert 2 * config.consumer_registers + config.producer_registers <= 3 * config.max_registers
    config = hopper_backward_config(256)
    assert compiled[256, "causal", "fp16"][0].registers == config.max_registers
    assert 4 * 128 * config.max_registers <= 65536
    kept = 2 * config.consumer_registers + config.dq_registers + config.producer_registers
    assert kept <= 4 * config.max_registers


@pytest.mark.parametrize(("dtype", "packed"), [("fp16", False), ("bf16", False), ("fp16", True)])
@pytest.mark.parametrize("width", WIDTHS)
def test_conversion_of_dq(width: int, dtype: str, packed: bool) -> None:
    """16 bytes a load, and rows leave through TMA."""
    signature = {
        "desc_dq": f"tensordesc<{dtype}[1, 1, 64, {width}]>", "sums_ptr": "*fp32:16", "sm_scale": "fp32",
        "H": "i32", "B": "i32", "num_m": "i32", "tiles": "i32",
    }  # fmt: skip
    constants = {"BLOCK_D": width, "PADDING": hopper_backward_config(width).block_m, "cu_q": None}
    if packed:
        signature |= {"desc_dq": f"tensordesc<{dtype}[1, 1, 1, 64, {width}]>", "cu_q": "*i32"}
        del constants["cu_q"]
    job = Job(hopper_backward_passes.__file__, "attention_backward_dq", signature, constants, width // 16)
    (stats,) = inspect_sm90.compile_all([job])
    loads = Counter("LDG.E.128" in text for text in stats.listing if "LDG" in text)
    assert loads == ({True: 8, False: 3} if packed else {True: 8}), "and offsets of sequences"
    assert stats.opcodes["UTMASTG"] == 1 and not stats.opcodes.get("STG")
    assert stats.spills == 0 and stats.ctas_per_sm * width // 16 >= 48, "warps to hide the latency of memory"


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("width", WIDTHS)
def test_sums_of_dq_are_set_to_zero(width: int, packed: bool) -> None:
    """16 bytes a store, in the pass that computes delta."""
    padding = hopper_backward_config(width).block_m
    lengths = Lengths(3, 200, 200) if packed else None
    shape = torch.Size((500, 4, width) if packed else (3, 4, 200, width))
    launch, _, _ = launch_backward.rows_launch(shape, torch.float16, 0, lengths, padding, width)
    names = backward.attention_backward_rows.arg_names
    pointers = {"lse_ptr": "*fp32:16", "rows_ptr": "*fp32:16", "sums_ptr": "*fp32:16", "cu_q": "*i32:16"}
    descriptors = (f"tensordesc<fp16{list(block)}>" for block in launch.blocks)
    signature = dict(zip(names, descriptors, strict=False)) | pointers
    signature |= {name: "i32" for name in ("S_q", "T_q", "H", "B", "padded")}
    constants = dict(zip(names[-len(launch.constants) :], launch.constants, strict=True))
    if not packed:
        constants |= {"cu_q": None, "T_q": None}
        del signature["cu_q"], signature["T_q"]
    (stats,) = inspect_sm90.compile_all([Job(backward.__file__, launch.kernel, signature, constants, 4)])
    stores = Counter("STG.E.128" in text for text in stats.listing if "STG" in text)
    assert stores[True] == launch.constants[0] * width // (4 * 128), "four columns of a row for each thread"
    assert stores[False] == 2 and stats.spills == 0, "lse2 and delta"
