"""The Hopper forward kernel under a block mask with `keep_shift`, in the emulator: masks of every kind,
scores that rise or fall from block to block, sinks, rows whose first blocks are partial or show them nothing;
and planted bugs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import families
import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import in_turn, with_more
from emulated import ORDERS, mutate, on_the_cpu
from mutations import Mutation
from sparse_cases import FUNCTIONS

from attnlib import BlockMask, Score
from attnlib.kernels.common import kept_shift
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.kernels.sparse import hopper, hopper_kernel
from attnlib.kernels.sparse.configs_hopper import WIDE, HopperSparseConfig, hopper_sparse_config
from attnlib.params import MaskWindow, Params
from attnlib.scores import parts_of

pytestmark = INTERPRETER_REMARKS

CONFIGS = {
    "early": HopperSparseConfig(64, 2, 64, keep_shift=True),
    "64": replace(hopper_sparse_config(64), keep_shift=True),
    "wide": replace(WIDE, keep_shift=True),
    "128": replace(hopper_sparse_config(128), keep_shift=True),
    "256": replace(hopper_sparse_config(256), keep_shift=True),
}
MASKS = FUNCTIONS | {
    # Rows see their first keys in the second, third ... block of their tile, and some see none.
    "late": lambda b, h, q, k: (k >= 3 * (q % 128)) & (q % 5 != 3),
    "early whole": lambda b, h, q, k: (k < 128) | (k % 64 > q % 64),
}


def tensors(D: int, kind: str, S_q: int = 300, S_k: int = 400, dtype=torch.float16):
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, S, D, generator=rng) for S in (S_q, S_k, S_k))
    if kind == "large":
        q *= 12
    if kind == "sink":
        q[..., 0], k[..., 0] = 8, 0
        k[:, :, 0, 0] = 30
    if kind in ("rising", "falling"):
        steps = torch.arange(S_k) // 64 * 16.0
        q[..., 0], k[..., 0] = 4, steps if kind == "rising" else -steps
    if kind == "far below":
        q[..., 0], k[..., 0] = 20, -300
    if kind == "up and down":
        q[..., 0], k[..., 0] = torch.arange(S_q) % 3 - 1.0, torch.arange(S_k) // 64 * 300.0
    return q.to(dtype), k.to(dtype), v.to(dtype)


def check(config, kind="normal", mask="dots", scale=0.3, score=None, D=64, mutants=None, **how):
    """AssertionError for a wrong output or LSE; returns what ran."""
    dtype, order = how.get("dtype", torch.float16), how.get("order", "random")
    q, k, v = tensors(D, kind, dtype=dtype)
    if mask == "blocks":
        made = BlockMask.from_blocks(torch.tensor([[1, 0, 1], [0, 1, 1], [1, 0, 0]]).bool(), 300, 384)
        k, v = k[:, :, :384], v[:, :, :384]
    else:
        made = BlockMask.from_function(MASKS[mask], q.shape[2], k.shape[2])
    parts = None if score is None else parts_of(score, q, k)
    params = Params(
        MaskWindow(None, None), scale, return_lse=True, config=config, block_mask=made, score=parts
    )
    with on_the_cpu(order, 0, mutants=mutants) as kernels:
        out, lse = families.forward(hopper, q, k, v, params)
    truth, truth_lse = attention_fp64(q, k, v, sm_scale=scale, mask=made.to_dense(), score=parts)
    close = 1e-2 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(out.double(), truth, rtol=close, atol=close)
    torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-5, atol=1e-5)
    return kernels["attention_sparse_forward_hopper"]


@pytest.mark.parametrize(("mask", "kind"), in_turn([*MASKS, "blocks"], ("up and down", "normal")))
def test_masks(mask, kind):
    check(CONFIGS["early"], kind, mask)


MISLEADING = "large", "sink", "rising", "falling", "far below", "up and down"


@pytest.mark.parametrize(
    ("case", "mask"), in_turn(product(MISLEADING, ("64", "wide")), ("late", "blocks", "documents")), ids=str
)
def test_inputs_that_mislead(case, mask):
    kind, name = case
    check(CONFIGS[name], kind, mask)


WIDER = with_more(
    [(128, "late", True), (128, "blocks", False), (256, "late", False), (256, "blocks", True)],
    product((128, 256), ("late", "blocks"), (True, False)),
)
"""Columns, mask, whether scores rise; others are of bfloat16."""


@pytest.mark.parametrize(("D", "mask", "rising"), WIDER)
def test_other_widths(D, mask, rising):
    if rising:
        check(CONFIGS[str(D)], "rising", mask, D=D, scale=-0.3)
    else:
        check(CONFIGS[str(D)], "normal", mask, D=D, dtype=torch.bfloat16)


SCORES = {
    "soft cap": Score(soft_cap=30.0),
    "sinks": Score(sinks=torch.tensor([3.0, -torch.inf])),
    "both": Score(soft_cap=30.0, sinks=torch.tensor([3.0, -5.0])),
}
OTHERS = {
    "ALiBi": Score(alibi=torch.tensor([0.5, 0.1])),
    "bias": Score(bias=torch.randn(300, 400, generator=torch.Generator().manual_seed(3)).half()),
}


def keeps(kernel) -> bool:
    """Whether the plan that ran keeps shifts."""
    given = (*kernel._args, *kernel._kwargs.values())
    (plan,) = (x for x in given if type(x).__name__ == "SparsePlan")
    return plan.keep_shift.value


@pytest.mark.parametrize(("score", "mask"), in_turn([*SCORES, *OTHERS], ("late", "all")))
def test_scores(score, mask):
    """Caps and sinks keep shifts, others do without."""
    given = (SCORES | OTHERS)[score]
    kernel = check(CONFIGS["wide"], "large" if score in SCORES else "normal", mask, score=given, scale=0.1)
    assert keeps(kernel) == (score in SCORES)


@pytest.mark.parametrize("order", ORDERS)
def test_orders(order):
    kernel = check(CONFIGS["64"], "rising", "late", order=order)
    assert keeps(kernel)
    kernel.repeat(order, 1)


BUGS = [
    Mutation("a row that has seen nothing keeps -inf", "shift = gl.maximum(shift, LOWEST)", "shift = shift",
             "late", "", module=kept_shift),
    Mutation("a row that has seen nothing has a shift of 0", "gl.maximum(shift, LOWEST)",
             "gl.where(shift < LOWEST, 0.0, shift)", "late", "", module=kept_shift),
    Mutation("bits are not looked at", "sums, dtype, plan.hides, plan)", "sums, dtype, False, plan)", "late",
             "", module=hopper_kernel),
    Mutation("weights too large stay", "{(127 + softmax.LAZY.value) << 23:08X}", "7F800000", "late", "",
             module=kept_shift),
    Mutation("O is not scaled anew", "softmax.rescale(acc[i], alpha, changed)", "acc[i]", "blocks", "",
             module=kept_shift),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_planted_bug_is_found(bug):
    mutants = mutate(bug)
    with pytest.raises(AssertionError):
        for kind in ("far below", "rising"):
            check(CONFIGS["early"], kind, bug.caught_by, mutants=mutants)


def test_which_calls_keep_their_shifts() -> None:
    """Those that were measured: up to 128 columns, full blocks and bits, soft caps and sinks; not ALiBi. At
    D = 128 short rows without a score take steps of 64 keys, and two buffers for queries."""
    for head_dim, blocks in ((64, 8), (128, 8), (128, 20), (192, 8)):
        q = torch.zeros(1, 1, 128 * blocks, head_dim, dtype=torch.float16)
        full = BlockMask.from_blocks(torch.ones(1, 1, blocks, blocks, dtype=torch.bool), *q.shape[2:3] * 2)
        bits = BlockMask.from_function(lambda b, h, i, j: i >= j, *q.shape[2:3] * 2)
        alibi = Score(alibi=torch.ones(1))
        chosen = torch.ones(1, 1, blocks, blocks, dtype=torch.bool)
        few = BlockMask.from_chosen(chosen, q.shape[2], density=0.5)
        known = [(mask, None) for mask in (full, bits, few, BlockMask.from_chosen(chosen, q.shape[2]))]
        for mask, score in (*known, (full, Score(soft_cap=20.0)), (full, alibi)):
            params = Params(MaskWindow(None, None), 0.1, block_mask=mask)
            if score is not None:
                params = params._replace(score=parts_of(score, q, q))
            config = hopper.configuration(q, q, q, params)
            short = score is None and (blocks == 8 or mask is few) and head_dim == 128
            assert config.keep_shift is (score is not alibi and head_dim <= 128)
            assert config.q_buffers == 1 + short
            if head_dim == 128:
                assert config.block_n == (64 if short else 128)
