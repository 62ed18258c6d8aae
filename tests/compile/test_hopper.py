"""The Hopper kernel compiled for sm_90 in every configuration: what `attention` runs on an H100 or H200."""

from __future__ import annotations

from itertools import product

import pytest
import side_by_side
import torch
from chosen import with_more
from gluon_kernels import check_assembly, tile_types
from hopper_forward import compile_forward

from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Stats
from attnlib.bench.sass import opcode
from attnlib.kernels.hopper import launch
from attnlib.kernels.hopper.configs import (
    M128N128,
    M192N128,
    M256N64,
    OWN_VALUES,
    SPLIT,
    hopper_config,
)

# What a call asks for: causal, blocks to mask, rows of a tile end in different blocks (None: where a tile is
# not as tall as a block is wide), negative scale, LSE; and what else: a right bound that is not 0, a left
# one, varlen sequences.
KINDS = {
    "causal": (True, 1, None, False, False),
    "causal, LSE": (True, 1, None, False, True),
    "causal, negative": (True, 1, None, True, False),
    "shifted, LSE": (True, 2, True, False, True),
    "shifted, negative, LSE": (True, 2, True, True, True),
    "dense": (False, 0, False, False, False),
    "tail, LSE": (False, 1, False, False, True),
    "idle": (False, 0, True, False, False),  # warpgroups of the last tile that have no rows
    "idle, tail, LSE": (False, 1, True, False, True),
    "left": (False, 0, False, False, False, "left"),
    "left, shifted, LSE": (True, 2, True, True, True, "left", "shifted"),
    "right": (True, 1, None, False, True, "shifted"),
    "varlen, causal, LSE": (True, 2, True, False, True, "varlen"),
    "varlen, dense, LSE": (False, 1, True, False, True, "varlen"),
    "varlen, all, LSE": (True, 2, True, True, True, "varlen", "left", "shifted"),
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
BFLOAT16 = [*product(("64", "128", "256"), ("causal",)), ("64", "varlen, causal, LSE")]
"""As many registers, other conversions."""
M128N128_KINDS = "causal", "shifted, negative, LSE", "idle, tail, LSE", "varlen, all, LSE"
M192N128_KINDS = "causal", "shifted, negative, LSE", "dense", "left", "varlen, all, LSE"
WIDE_KINDS = (
    "causal", "causal, LSE", "shifted, negative, LSE", "dense", "idle, tail, LSE", "left, shifted, LSE",
    "varlen, all, LSE",
)  # fmt: skip
"""At D = 128 and 256. At D = 64 each kind is compiled; elsewhere every part of a kind, in few kernels."""
SPLIT_KINDS = ("causal", "shifted, negative, LSE", "varlen, all, LSE")
CONFIGS = {
    "64": M256N64,
    "64 M192N128": M192N128,
    "64 M128N128": M128N128,
    "128": hopper_config(128),
    "256": hopper_config(256),
    **{str(width): config for width, config in SPLIT.items()},
    **{f"{columns}/{values}": config for (columns, values), config in OWN_VALUES.items()},
}
PAIRS = [name for name in CONFIGS if "/" in name]
"""Columns of queries and of values."""
FIRST = [
    *product(("64", "128", "80", "192", "192/128", "128/64", "64/256"), ("causal",), ("fp16",)),
    ("64 M192N128", "dense", "fp16"),
    *product(("64 M128N128", "96", "128"), ("varlen, all, LSE",), ("fp16",)),
    ("64", "idle, tail, LSE", "fp16"),
    ("256", "causal", "bf16"),
]
"""Each configuration, each part of a kind."""
CASES = with_more(
    FIRST,
    [
        *product([name for name in CONFIGS if name not in PAIRS], ("causal",), ("fp16",)),
        *product(("64",), KINDS, ("fp16",)),
        *product(("128", "256"), WIDE_KINDS, ("fp16",)),
        *product(("64 M192N128",), M192N128_KINDS, ("fp16",)),
        *product(("64 M128N128",), M128N128_KINDS, ("fp16",)),
        *product(map(str, SPLIT), SPLIT_KINDS, ("fp16",)),
        *product(("192/128",), WIDE_KINDS, ("fp16", "bf16")),
        *product(PAIRS, SPLIT_KINDS, ("fp16",)),
        *((*case, "bf16") for case in BFLOAT16),
    ],
)
HGMMA = {"64": 64, "64 M192N128": 72, "64 M128N128": 48, "128": 64, "256": 80, "80": 78, "96": 84, "192": 80}
HGMMA |= {"64/64": 72, "128/64": 72, "192/64": 96, "256/64": 80}
HGMMA |= {"64/128": 48, "128/128": 64, "192/128": 80, "256/128": 80}
HGMMA |= {"64/256": 32, "128/256": 48, "192/256": 64, "256/256": 80}
"""Products in the code of all consumers: first block, loop, last values."""
SPILLS = dict.fromkeys(product(("256",), ("varlen, all, LSE",)), 2)
SPILLS |= dict.fromkeys(product(("64 M192N128", "64/64"), ("causal", "dense")), 2)
SPILLS |= dict.fromkeys([("128", "idle, tail, LSE"), ("192/128", "causal, LSE")], 2)
SPILLS |= dict.fromkeys(product(("256",), ("causal", "causal, LSE", "idle, tail, LSE")), 4)
"""Words that spill. In all other code there are none."""


def compile_case(case: tuple[str, str, str]) -> Stats:
    """The compiled kernel in numbers."""
    name, kind, dtype = case
    columns, config = [int(part) for part in name.split()[0].split("/")], CONFIGS[name]
    width = columns[-1]
    causal, masked, skip, flip, lse, *others = KINDS[kind]
    if skip is None:
        skip = config.block_n != 64 * config.warpgroups
    varlen = "varlen" in others
    mask = {"causal": causal, "shifted": "shifted" in others, "left": "left" in others}
    mask |= {"blocks": masked, "skip": skip}
    plan = launch.make_plan(width, config, mask, flip, lse, varlen)
    # What is described depends on the window of a tensor only in its columns.
    of_queries, of_values = ((columns[0],), (1,)), ((width,), (1,))
    windows = of_queries, of_queries, of_values, of_values
    types = tile_types(launch.descriptors(windows, width, config, DTYPES[dtype], varlen), dtype)
    return compile_forward(plan, types, {*others, *["LSE"] * lse}, config)


@pytest.fixture(scope="module")
def compiled() -> dict[tuple, Stats]:
    return dict(zip(CASES, side_by_side.run(compile_case, CASES), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_configuration(compiled: dict[tuple, Stats], case: tuple) -> None:
    stats, (name, kind, _) = compiled[case], case
    print(f"{case}: {stats.registers} registers, {stats.spills} words, {stats.shared_bytes} bytes")
    assert stats.opcodes["HGMMA"] == HGMMA[name] and not stats.opcodes.get("HMMA")
    assert stats.opcodes.get("UTMALDG") and stats.opcodes.get("UTMASTG"), "no TMA"
    assert stats.opcodes.get("USETMAXREG"), "registers are not shared out anew"
    assert stats.spills == SPILLS.get((name, kind), 0)
    assert stats.warnings == (), "wgmma serialized?"
    assert stats.shared_bytes <= SMEM_LIMIT
    assert stats.registers == CONFIGS[name].max_registers


@pytest.mark.parametrize(("name", "most"), [("64", 175), ("128", 325)])
def test_where_shifts_are_kept_no_maximum_is_on_the_way(compiled, name: str, most: int) -> None:
    """Up to the vote, after which a warp with a large weight goes another way."""
    for listing in compiled[name, "causal", "fp16"].loop_listings:
        vote = next(i for i, text in enumerate(listing) if "VOTE.ANY" in text)
        before = [opcode(text) for text in listing[:vote]]
        assert len(before) < most and not {"FMNMX", "SHFL", "STS", "LDS"} & set(before)
        assert before.count("MUFU.EX2") == before.count("FFMA") == CONFIGS[name].block_n // 2


def test_the_program_fits_its_registers() -> None:
    """At the start all warps have max_registers; afterwards the consumers get what the producer gives up."""
    for config in CONFIGS.values():
        warpgroups = config.warpgroups + 1
        assert 128 * warpgroups * config.max_registers <= 65536
        later = config.warpgroups * config.consumer_registers + config.producer_registers
        assert later <= warpgroups * config.max_registers


def test_an_operand_that_is_overwritten_is_found() -> None:
    lost_sum = "add.f32 %f7, %f7, %f1; @!q bra DONE; ex2.approx.ftz.f32 a, a; mul.f32 %f7, %f7, a; DONE: }"
    lost_factor = "mov.b32 %f1, %f2; @!q bra DONE; mul.f32 %f1, %f1, %f3; mul.f32 %f3, %f3, %f4; DONE: }"
    for block in lost_sum, lost_factor:
        with pytest.raises(AssertionError, match="is lost"):
            check_assembly(block)
    sound = lost_factor.replace(" %f3;", " %f5;")
    lost_element = sound.replace("mov.b32 %f1, %f2;", "mov.b32 %f1, %f2; mov.b32 %f6, %f1;")
    with pytest.raises(AssertionError, match="an element is lost"):
        check_assembly(lost_element)
        check_assembly(block.replace("f7, %f7, %f1", "f7, %f6, %f1").replace(" %f3;", " %f5;"))
