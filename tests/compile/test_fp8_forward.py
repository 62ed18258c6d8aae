"""The FP8 forward kernel compiled for sm_90 as a call on a GPU would have it."""

from __future__ import annotations

from itertools import product

import pytest
import side_by_side
import torch
from chosen import with_more
from gluon_kernels import tile_types
from hopper_forward import compile_forward

from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Stats
from attnlib.bench.sass import opcode
from attnlib.kernels.hopper import launch_fp8 as launch
from attnlib.kernels.hopper.configs import HopperConfig
from attnlib.kernels.hopper.configs_fp8 import fp8_config
from attnlib.kernels.hopper.launch import plan_fields

WIDTHS = (64, 128, 256)
# What a call asks for: causal, blocks to mask, warpgroups of a tile end in different blocks (None: where a
# tile is not as tall as a block is wide), LSE, and what else; as in test_hopper.
KINDS = {
    "causal": (True, 1, None, False),
    "dense": (False, 0, False, False),
    "idle, tail, LSE": (False, 1, True, True),
    "left, shifted, LSE": (True, 2, True, True, "left", "shifted"),
    "varlen, causal, LSE": (True, 2, True, True, "varlen"),
    "varlen, all, LSE": (True, 2, True, True, "varlen", "left", "shifted"),
}
PLAIN = "dense, not centered"
KINDS[PLAIN] = (False, 0, False, False, "not centered")
OWN_QUERIES = "causal, own queries", "dense, own queries", "varlen, own queries"
KINDS |= {
    OWN_QUERIES[0]: (True, 1, None, False, "own queries"),
    OWN_QUERIES[1]: (False, 0, False, False, "own queries"),
    OWN_QUERIES[2]: (True, 2, True, True, "varlen", "left", "shifted", "own queries"),
}
CASES = with_more(
    [
        (64, "causal", "bf16"), (128, "dense", "bf16"), (128, PLAIN, "bf16"),
        (256, "varlen, all, LSE", "bf16"), (64, OWN_QUERIES[1], "bf16"), (128, OWN_QUERIES[2], "fp32"),
    ],
    [
        *product(WIDTHS, (kind for kind in KINDS if kind not in (PLAIN, *OWN_QUERIES)), ("bf16",)),
        *product(WIDTHS, ("varlen, all, LSE",), ("fp32",)),
        *product((64, 128), OWN_QUERIES, ("bf16",)), *product((64, 128), OWN_QUERIES[2:], ("fp32",)),
    ],
)  # fmt: skip
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SPILLS: dict[tuple[int, str, str], int] = {}


def config_of(case: tuple[int, str, str]) -> HopperConfig:
    """What such a call has."""
    causal, _, _, _, *others = KINDS[case[1]]
    kind = None if {"varlen", "left"} & set(others) else "causal" if causal else "dense"
    own_queries = "own queries" in others
    return fp8_config(case[0], kind, own_queries, own_queries and case[2] == "fp32")


KEPT_CASES = [case for case in CASES if config_of(case).keep_shift]


def compile_case(case: tuple[int, str, str]) -> Stats:
    """The compiled kernel in numbers."""
    width, kind, dtype = case
    config = config_of(case)
    causal, masked, skip, lse, *others = KINDS[kind]
    if skip is None:
        skip = config.block_n != 64 * config.warpgroups
    varlen, centered = "varlen" in others, "not centered" not in others
    mask = {"causal": causal, "shifted": "shifted" in others, "left": "left" in others}
    mask |= {"blocks": masked, "skip": skip}
    own = "own queries" in others
    plan = launch.make_plan(plan_fields(width, config, mask, False, lse, varlen), centered, own, own)
    queries = torch.bfloat16 if own else None
    described = launch.described((None,) * 4, width, config, DTYPES[dtype], varlen, queries)
    types = tile_types(described, "fp8e4nv", desc_o=dtype, **({"desc_q": "bf16"} if own else {}))
    options = {*others, "fp8", "LSE" if lse else "", "" if varlen else "fp8 batch"}
    if not own:
        options |= {"fp8 queries", "" if varlen else "fp8 queries, batch"}
    options.add("centered" if centered else "")
    return compile_forward(plan, types, options, config)


@pytest.fixture(scope="module")
def compiled() -> dict[tuple, Stats]:
    return dict(zip(CASES, side_by_side.run(compile_case, CASES), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_configuration(compiled: dict[tuple, Stats], case: tuple) -> None:
    stats, config = compiled[case], config_of(case)
    print(f"{case}: {stats.registers} registers, {stats.spills} words, {stats.shared_bytes} bytes")
    rotations = case[0] // 64 * config.warpgroups if case[1] in OWN_QUERIES else 0
    assert stats.opcodes["QGMMA"] and not stats.opcodes.get("HMMA")
    assert (stats.opcodes.get("HGMMA", 0) > 0) == (rotations > 0), "queries are rotated by tensor cores"
    assert stats.opcodes.get("UTMALDG") and stats.opcodes.get("UTMASTG"), "no TMA"
    assert stats.opcodes.get("USETMAXREG"), "registers are not shared out anew"
    assert stats.registers == config.max_registers
    assert stats.spills == SPILLS.get(case, 0)
    assert stats.warnings == (), "wgmma serialized?"
    assert stats.shared_bytes <= SMEM_LIMIT


def test_a_mean_costs_the_loop_nothing(compiled: dict[tuple, Stats]) -> None:
    """The same but for a few moves between registers."""
    for one, other in zip(*(compiled[128, kind, "bf16"].loops for kind in ("dense", PLAIN)), strict=True):
        assert abs(sum(one.values()) - sum(other.values())) <= 4


@pytest.mark.parametrize(
    "case", [case for case in CASES if case not in KEPT_CASES], ids=lambda case: "-".join(map(str, case))
)
def test_weights_move_to_no_other_thread(compiled: dict[tuple, Stats], case: tuple) -> None:
    """P is in the order of the second product as it is, and packed in words: no PRMT, and no SHFL but those
    of the row maxima (two rows of a thread, two steps)."""
    loops = compiled[case].loops
    assert len(loops) == config_of(case).warpgroups
    for loop in loops:
        assert loop["QGMMA"] and not loop.get("PRMT") and loop["SHFL"] == 4


@pytest.mark.parametrize("case", KEPT_CASES, ids=lambda case: "-".join(map(str, case)))
def test_where_shifts_are_kept_no_maximum_is_on_the_way(compiled: dict[tuple, Stats], case: tuple) -> None:
    """Up to the vote, after which a warp with a large weight goes another way: the exponentials of a thread,
    the largest of their sums of four, no exchange between threads, no spill. The scale of queries times that
    of keys is one instruction; own queries have a scale for both rows of a thread."""
    stats, scales = compiled[case], 2 if case[1] in OWN_QUERIES else 1
    scores = config_of(case).block_n // 2  # of a thread
    assert len(stats.loop_listings) == config_of(case).warpgroups
    for listing in stats.loop_listings:
        vote = next(i for i, text in enumerate(listing) if "VOTE.ANY" in text)
        before = [opcode(text) for text in listing[:vote]]
        assert len(before) < 325 and not {"FMNMX", "SHFL", "LDS", "STS"} & set(before)
        assert before.count("MUFU.EX2") == scores and before.count("FFMA") == scores + scales
        assert before.count("VIMNMX") + before.count("VIMNMX3") <= 12
        assert not {"LDL", "STL"} & {opcode(text) for text in listing}
