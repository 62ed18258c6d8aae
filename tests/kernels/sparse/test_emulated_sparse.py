"""The Hopper kernels under a block mask in the emulator: every kind of mask and option, in many orders; and
bugs planted in their text, each of which the emulator notices."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from operator import attrgetter
from types import ModuleType

import families
import pytest
import torch
import triton
from cases import INTERPRETER_REMARKS
from chosen import first_of_each, in_turn, with_more
from emulated import ORDERS, Recorded, mutate, on_the_cpu
from mutations import Mutation, check_places
from sparse_cases import FUNCTIONS

from attnlib import BlockMask, S2Pattern
from attnlib.emulator import Deadlock, Race
from attnlib.kernels.common import backward_pair, l2_sections, tile_scheduler
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.kernels.reference.gradients import gradient_fp64
from attnlib.kernels.sparse import (
    bits,
    hopper,
    hopper_backward_kernel,
    hopper_kernel,
    hopper_output,
    hopper_tiles,
    queries,
)
from attnlib.kernels.sparse import hopper_backward_columns as columns
from attnlib.kernels.sparse import hopper_backward_steps as steps
from attnlib.kernels.sparse import hopper_backward_wide_kernel as wide
from attnlib.kernels.sparse.configs_hopper import (
    SHARED,
    WIDE,
    HopperSparseBackwardConfig,
    HopperSparseConfig,
    hopper_sparse_backward_config,
    hopper_sparse_config,
)
from attnlib.params import MaskWindow, Params
from attnlib.scores import Score, parts_of

pytestmark = INTERPRETER_REMARKS


S2 = {
    "S2": S2Pattern(3, local_blocks=1, stride=3),
    "S2, shared keys": S2Pattern(4, kv_heads=2, local_blocks=1, stride=2),
    "S2, a dense head": S2Pattern(3, local_blocks=1, stride=4, dense_heads=1),
}
"""Whose keys the backward kernel gathers."""


@dataclass(frozen=True)
class Call:
    """A call under a mask of `FUNCTIONS` or of `S2`, or under random blocks of 128 without bits."""

    D: int = 64
    mask: str = "causal"
    S_q: int = 300
    S_k: int = 400
    H: int = 2
    H_kv: int = 1
    B: int = 1
    dtype: torch.dtype = torch.float16
    sm_scale: float = 0.1
    return_lse: bool = True
    config: HopperSparseConfig | HopperSparseBackwardConfig | None = None

    def block_mask(self) -> BlockMask:
        if self.mask.startswith("S2"):
            return S2[self.mask].mask(self.S_k)
        if self.mask == "window":  # of blocks of 64, the own one and two before it
            near = lambda b, h, i, j: (i >= j) & (i // 64 - j // 64 < 3)  # noqa: E731
            return BlockMask.from_function(near, self.S_q, self.S_k)
        if self.mask == "random":
            rng = torch.Generator().manual_seed(1)
            blocks = torch.rand(1, self.H, -(-self.S_q // 128), self.S_k // 128, generator=rng) < 0.5
            blocks[..., 0] = True  # a row that sees nothing would need bits
            return BlockMask.from_blocks(blocks, self.S_q, self.S_k)
        by_batch, by_head = (self.mask.endswith((f"by {word}", "by both")) for word in ("batch", "head"))
        shared = {"B": self.B if by_batch else None, "H": self.H if by_head else None}
        return BlockMask.from_function(FUNCTIONS[self.mask], self.S_q, self.S_k, **shared)


def check(call: Call, order: str = "random", seed: int = 0, **where) -> Recorded:
    """AssertionError for a wrong result; returns what ran."""
    rng, mask = torch.Generator().manual_seed(0), call.block_mask()
    shapes = (call.B, call.H, call.S_q, call.D), *2 * [(call.B, call.H_kv, call.S_k, call.D)]
    q, k, v = (torch.randn(shape, generator=rng).to(call.dtype) for shape in shapes)
    params = Params(
        MaskWindow(None, None), call.sm_scale, return_lse=call.return_lse, config=call.config, block_mask=mask
    )
    with on_the_cpu(order, seed, **where) as kernels:
        out, lse = families.forward(hopper, q, k, v, params)
    truth, truth_lse = attention_fp64(q, k, v, sm_scale=call.sm_scale, mask=mask.to_dense())
    close = {"rtol": 1e-2, "atol": 1e-2} if call.dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(out.double(), truth, **close)
    assert (lse is not None) == call.return_lse
    if lse is not None:
        torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-5, atol=1e-5)
    return kernels["attention_sparse_forward_hopper"]


def check_backward(call: Call, order: str = "random", seed: int = 0, **where) -> Recorded:
    """AssertionError for a wrong gradient; returns what ran."""
    rng, mask = torch.Generator().manual_seed(0), call.block_mask()
    shapes = (call.B, call.H, call.S_q, call.D), *2 * [(call.B, call.H_kv, call.S_k, call.D)]
    q, k, v, d_out = (torch.randn(shape, generator=rng).to(call.dtype) for shape in (*shapes, shapes[0]))
    options = {"sm_scale": call.sm_scale, "mask": mask.to_dense()}
    out, lse = attention_fp64(q, k, v, **options)
    params = Params(
        MaskWindow(None, None), call.sm_scale, return_lse=True, config=call.config, block_mask=mask
    )
    with on_the_cpu(order, seed, **where) as kernels:
        found = families.backward(hopper, d_out, q, k, v, out.to(q.dtype), lse.float(), params)
    close = {"rtol": 3e-2, "atol": 3e-2} if call.dtype == torch.bfloat16 else {"rtol": 2e-3, "atol": 2e-3}
    for ours, theirs in zip(found, gradient_fp64(d_out, q, k, v, **options), strict=True):
        torch.testing.assert_close(ours.double(), theirs, **close)
    ran = [kernel for name, kernel in kernels.items() if "sparse_backward" in name and kernel.reports]
    assert len(ran) == 1
    return ran[0]


PAIRS = HopperSparseConfig(64, 2, 64, pairs=2, joint=True)
LATE_PAIRS = replace(SHARED, late_wait=True, pin=True)
APART = HopperSparseConfig(64, 2, 32)
WHOLE = replace(APART, o_columns=64)
NAMED = HopperSparseConfig(128, 2, 64, joint=True, named=True)
Q_KEPT = HopperSparseConfig(64, 2, 64, q_columns=32, late_wait=True, pin=True)
TWO_Q = replace(WHOLE, q_buffers=2)
TWO_Q_128 = replace(hopper_sparse_config(128, coarse=False), keep_shift=True, q_buffers=2)
ENDS = replace(APART, stages=4, leaves_out=True)
ENDS_TWO_Q = replace(ENDS, o_columns=64, q_buffers=2, keep_shift=True, joint=True, named=True)
ENDS_PAIRS = replace(PAIRS, leaves_out=True, keep_shift=True)
CALLS = {
    **{f"{mask}": Call(mask=mask) for mask in FUNCTIONS},
    **{f"{D} random": Call(D, "random", 300, 384, 3, 3) for D in (64, 128, 256)},
    **{f"{D} dots": Call(D, "dots", 200, 150) for D in (128, 256)},
    "fine, of 128": Call(128, "stripes", 200, 300, config=hopper_sparse_config(128, coarse=False)),
    "by both": Call(64, "band by both", 140, 300, 4, 2, 2),
    "bfloat16": Call(64, "dots", 140, 150, dtype=torch.bfloat16),
    "negative": Call(64, "documents", 140, 150, sm_scale=-0.2),
    "no LSE": Call(64, "documents", 140, 150, return_lse=False),
    "one row": Call(64, "all", 1, 1),
    "wide": Call(64, "documents", 260, 390, config=WIDE),
    "apart": Call(64, "documents", 260, 390, config=APART),
    "named": Call(64, "documents", 260, 390, config=NAMED),
    "quarters": Call(256, "causal", 140, 140, config=HopperSparseConfig(64, 2, 64)),
    "Q in registers": Call(64, "random", 520, 384, 3, 3, config=Q_KEPT),
    "many tiles": Call(64, "causal", 520, 520, 5, 1, config=PAIRS),
    "short": Call(64, "random", 100, 128, 9, 1, config=PAIRS),
    "late": Call(64, "band by head", 300, 384, 4, 2, config=LATE_PAIRS),
    "two Q": Call(64, "documents", 390, 390, 3, 3, config=TWO_Q),
    "two Q, one step": Call(64, "all", 520, 60, 3, 3, config=TWO_Q),
    "two Q, a row behind": Call(64, "documents", 200, 390, 3, 3, config=TWO_Q),
    "two Q in registers": Call(64, "random", 520, 384, 3, 3, config=replace(Q_KEPT, q_buffers=2)),
    "two Q, of 128": Call(128, "random", 520, 384, 3, 3, config=TWO_Q_128),
    **{
        f"ends, {mask}": Call(64, mask, 390, 390, 2, 2, config=ENDS)
        for mask in FUNCTIONS if "by" not in mask
    },
    "ends, S2": Call(64, "S2", 650, 650, 3, 3, config=ENDS),
    "ends, window": Call(64, "window", 650, 650, 3, 3, config=ENDS),
    "ends, two Q": Call(64, "window", 650, 650, 3, 3, config=ENDS_TWO_Q),
    "ends, pairs": Call(64, "S2", 650, 650, 3, 3, config=ENDS_PAIRS),
    "ends, a row behind": Call(64, "window", 200, 200, 3, 3, config=ENDS_TWO_Q),
    "ends, two Q, S2": Call(64, "S2", 650, 650, 3, 3, config=ENDS_TWO_Q),
}


ORDERED = (
    "apart", "named", "many tiles", "short", "Q in registers", "64 random", "two Q", "two Q, one step",
    "two Q in registers", "two Q, of 128", "ends, S2", "ends, window", "ends, two Q", "ends, two Q, S2",
    "ends, pairs",
)  # fmt: skip


BY_PLACE = "all", "band by head", "band by batch"
"""Masks that "band by both" stands for, and calls named after what is special in them."""
PLAIN = [call for call in CALLS if call not in (*ORDERED, *BY_PLACE)]


@pytest.mark.parametrize("call", with_more(PLAIN, CALLS))
def test_call(call):
    check(CALLS[call])


@pytest.mark.parametrize(("call", "order"), in_turn(ORDERED, ORDERS))
def test_orders(call, order):
    kernel = check(CALLS[call], order, 1)
    for seed in (2, 3) if order == "random" else ():
        kernel.repeat(order, seed)


CHOSEN = {D: hopper_sparse_backward_config(D) for D in (64, 128)}  # programs that stay, consumers in turns
ABREAST = {D: replace(CHOSEN[D], alternate=False) for D in CHOSEN}
LEAVES = {D: replace(CHOSEN[D], persistent=False, alternate=False) for D in CHOSEN}
WIDE = hopper_sparse_backward_config(256)  # programs of 64 keys, here of 128 columns, which take less time
BACKWARD = {
    **{f"{mask}": Call(mask=mask) for mask in FUNCTIONS},
    **{f"{D} random": Call(D, "random", 300, 384, 3, 3) for D in (64, 128)},
    "128 documents": Call(128, "documents", 260, 390),
    "by both": Call(64, "band by both", 140, 300, 4, 2, 2),
    "128 by both": Call(128, "band by both", 140, 300, 4, 2, 2),
    "bfloat16": Call(64, "dots", 140, 150, dtype=torch.bfloat16),
    "negative": Call(128, "documents", 140, 150, sm_scale=-0.08),
    "one row": Call(64, "all", 1, 1),
    "many steps": Call(64, "dots", 900, 100),
    "128 many steps": Call(128, "dots", 390, 100),
    "one group": Call(64, "random", 128, 128, 6, 1),
    **{f"wide {mask}": Call(128, mask, 200, 300, config=WIDE) for mask in FUNCTIONS},
    "wide by both": Call(128, "band by both", 140, 300, 4, 2, 2, config=WIDE),
    "wide many steps": Call(128, "dots", 390, 100, config=WIDE),
    "wide bfloat16": Call(128, "dots", 140, 150, dtype=torch.bfloat16, config=WIDE),
    "leaves, random": Call(64, "random", 300, 384, 3, 3, config=LEAVES[64]),
    "leaves, 128 documents": Call(128, "documents", 260, 390, config=LEAVES[128]),
    "leaves, one row": Call(64, "all", 1, 1, config=LEAVES[64]),
    "leaves, many steps": Call(64, "dots", 900, 100, config=LEAVES[64]),
    "leaves, 128 many steps": Call(128, "dots", 390, 100, config=LEAVES[128]),
    "leaves, 128 gathered": Call(
        128, "S2, shared keys", 400, 400, 4, 2, 1, torch.bfloat16, config=replace(LEAVES[128], gathered=True)
    ),
    "leaves, in turns": Call(128, "dots", 390, 100, config=replace(LEAVES[128], alternate=True)),
    "gathered": Call(64, "S2", 650, 650, 3, 3),
    "128 gathered": Call(128, "S2, shared keys", 400, 400, 4, 2, 2, torch.bfloat16),
    "128 gathered, a sequence": Call(128, "S2, shared keys", 400, 400, 4, 2, 1, torch.bfloat16),
    "gathered, a dense head": Call(64, "S2, a dense head", 650, 650, 3, 3),
    "one step each": Call(64, "all", 1, 700, 1),
    "two columns of one step": Call(64, "all", 1, 400, 1),
    "128 two steps each": Call(128, "all", 1, 700, 1),
    "three columns of a group": Call(64, "random", 128, 384, 6, 1),
    "abreast, random": Call(64, "random", 300, 384, 3, 3, config=ABREAST[64]),
    "abreast, 128 by both": Call(128, "band by both", 140, 300, 4, 2, 2, config=ABREAST[128]),
    "abreast, one step each": Call(64, "all", 1, 700, 1, config=ABREAST[64]),
    "abreast, one row": Call(64, "all", 1, 1, config=ABREAST[64]),
    "abreast, 128 gathered": Call(
        128, "S2, shared keys", 400, 400, 4, 2, 2, torch.bfloat16, config=replace(ABREAST[128], gathered=True)
    ),
    "256 random": Call(256, "random", 300, 384, 3, 3),
    "256 documents": Call(256, "documents", 260, 390),
    "256 many steps": Call(256, "dots", 390, 70, sm_scale=-0.05),
    "256 one row": Call(200, "all", 1, 1),
}


@pytest.mark.parametrize("given", [{"named": True}, {"copies_bias": True}, {"q_buffers": 2}])
def test_two_pairs_share_no_barriers_and_no_bias(given):
    with pytest.raises(ValueError, match="^pairs: expected 1 with named, copies_bias or two q_buffers, got"):
        replace(PAIRS, **given)


@pytest.mark.parametrize("given", [0, 3])
def test_there_are_one_or_two_buffers_for_queries(given):
    with pytest.raises(ValueError, match=f"^q_buffers: expected 1 or 2, got {given}$"):
        replace(PAIRS, q_buffers=given)


def test_who_leaves_out_steps():
    """Steps of 128 have both halves of a tile's rows. Where rows are long and steps of 128 keys cover no more
    than those of 64, marks cost more than is left out."""
    with pytest.raises(ValueError, match="^leaves_out: expected False with block_n=128, got True$"):
        replace(NAMED, leaves_out=True)
    for head_dim, leaves_out in ((64, True), (128, True), (256, False)):
        assert hopper_sparse_config(head_dim, short=True, keep=True).leaves_out is leaves_out
        assert hopper_sparse_config(head_dim, coarse=False, keep=True).leaves_out is leaves_out
        assert not hopper_sparse_config(head_dim, keep=True).leaves_out
        assert not hopper_sparse_config(head_dim, short=True).leaves_out  # ALiBi, a bias or a function


@pytest.mark.parametrize("option", ["gathered", "alternate", "persistent"])
def test_what_programs_of_64_keys_do_without(option):
    with pytest.raises(ValueError, match=f"^{option}: expected False with block_n=64, got True$"):
        replace(WIDE, **{option: True})


@pytest.mark.parametrize("score", [None, "soft cap", "ALiBi"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_who_gathers_keys(head_dim, score):
    """Not programs of 64 keys, and not where scores depend on the places of keys."""
    q = torch.zeros(1, 3, 1000, head_dim)
    own = {"soft cap": Score(soft_cap=9.0), "ALiBi": Score(alibi=torch.zeros(3))}.get(score)
    params = Params(MaskWindow(None, None), 1.0, block_mask=S2["S2"].mask(1000))
    params = params._replace(score=None if own is None else parts_of(own, q, q))
    gathered = head_dim < 256 and score != "ALiBi"
    assert hopper.configuration(q, q, q, params, backward=True).gathered == gathered
    params = params._replace(block_mask=BlockMask.from_function(FUNCTIONS["causal"], 1000, 1000), score=None)
    assert not hopper.configuration(q, q, q, params, backward=True).gathered


LONG = Call(64, "corner", 300, 600, 4, 2, 2), Call(64, "S2", 1100, 1100, 3, 3)


@pytest.mark.parametrize("call", LONG, ids=["a corner", "S2"])
def test_long_columns_come_first(call, monkeypatch):
    """Where a launch has many programs; here each has. The kernel is told of as many as the mask has."""
    monkeypatch.setattr(l2_sections, "FEW", 0)
    form = call.block_mask().form
    leading = (form.gathered or form).leading
    assert leading > 0 and (form.gathered is None) == (call is LONG[0])
    assert check_backward(call).given["LEADING"] == leading


@triton.jit
def _same(s, i, j, h, b):
    return s


SCORES = {
    "none": None,
    "cap": Score(soft_cap=30.0),
    "ALiBi": Score(alibi=torch.zeros(1)),
    "bias": Score(bias=torch.zeros(1, 1, 256, 256)),
    "function": Score(function=_same, derivative=_same),
}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_whose_programs_stay(D, score):
    """Up to 128 columns, without a bias and a function; consumers take turns there, but for capped scores of
    128 columns."""
    q = torch.empty(1, 1, 256, D, dtype=torch.float16)
    mask = BlockMask.from_function(lambda b, h, i, j: i >= j, 256, 256)
    given = None if SCORES[score] is None else parts_of(SCORES[score], q, q)
    params = Params(MaskWindow(None, None), 1.0, block_mask=mask, score=given)
    config = hopper.configuration(q, q, q, params, backward=True)
    stays = D <= 128 and score not in ("bias", "function")
    assert config.persistent is stays
    assert config.alternate is (stays and not (score == "cap" and D == 128))


ORDERED_BACKWARD = (
    "many steps", "128 many steps", "by both", "one group", "wide many steps", "wide by both",
    "128 gathered, a sequence", "one step each", "abreast, one step each", "leaves, many steps",
)  # fmt: skip
ALIKE = [f"wide {mask}" for mask in FUNCTIONS if mask in ("all", "dots", "corner") or "by" in mask]
"""Masks whose kinds of tiles other calls of this kernel have."""
SOME = [call for call in BACKWARD if call not in (*ORDERED_BACKWARD, *ALIKE, *BY_PLACE)]


@pytest.mark.parametrize("call", with_more(SOME, BACKWARD))
def test_backward(call):
    kernel = check_backward(BACKWARD[call])
    stays = call.startswith("abreast") or "leaves" not in call and "wide" not in call and "256" not in call
    assert not stays or kernel.programs <= 2  # SMs


@pytest.mark.parametrize(("call", "order"), in_turn(ORDERED_BACKWARD, ORDERS))
def test_orders_of_the_backward_pass(call, order):
    kernel = check_backward(BACKWARD[call], order, 1)
    for seed in (2, 3) if order == "random" else ():
        kernel.repeat(order, seed)


# ---------------------------------------------------------------- planted bugs


def planted(bug: str, call: str, verdict: str, edit: tuple[str, str], *more: tuple[str, str]) -> Mutation:
    return Mutation(bug, *edit, call, verdict, more, hopper_kernel)


WRONG = "AssertionError: Tensor-likes"
MUTATIONS = [
    planted("the words of a step are not waited for", "apart", "Race|Deadlock|Assertion",
            ("mbarrier.expect(bar, size + 2 * desc_words.block_type.nbytes)", "mbarrier.expect(bar, size)")),
    planted("a slot is released before its words are read", "apart", "Race",
            ("        s = _seen(s, mem, c, c >= middle, WG, plan)\n        release(mem, c, plan)\n",
             "        release(mem, c, plan)\n        s = _seen(s, mem, c, c >= middle, WG, plan)\n")),
    planted("the second warpgroup reads the words of the first", "apart", WRONG,
            ("mem.words.index(2 * slot(c, plan) + WG)", "mem.words.index(2 * slot(c, plan))")),
    planted("the first step with bits is taken for a whole one", "apart", WRONG,
            ("sums, i, i >= middle, turn", "sums, i, i > middle, turn")),
    planted("a tile of bits alone has a first step without", "many tiles", WRONG,
            ("_seen(s, mem, c, c >= middle, WG, plan)\n        release",
             "_seen(s, mem, c, c > middle, WG, plan)\n        release")),
    planted("values of the step itself", "apart", WRONG,
            ("_copy_v(desc_v, mem, c + i, tile, before, not", "_copy_v(desc_v, mem, c + i, tile, step, not")),
    Mutation("the step after is that of two further on", "gl.minimum(tile.first + i + 1, tile.end - 1)",
             "gl.minimum(tile.first + i + 2, tile.end - 1)", "apart", WRONG, module=hopper_tiles),
    planted("what only the other one sees is given back before it is there", "ends, window",
            "Race|Deadlock|Assertion",
            ("            wait_k(mem, start, plan)\n            release(mem, start, plan)\n",
             "            release(mem, start, plan)\n")),
    planted("what only the other one sees is not given back", "ends, window", "Deadlock|Race|Assertion",
            ("            wait_k(mem, start, plan)\n            release(mem, start, plan)\n",
             "            wait_k(mem, start, plan)\n")),
    planted("the slot of the last values is not given back", "ends, window", "Deadlock|Race|Assertion",
            ("            if last < end:\n                release(mem, last, plan)\n", "            pass\n")),
    planted("the first consumer ends a step too early", "ends, window", WRONG,
            ("told(mem, turn, LEFT_OUT, plan.words) >> 1", "1")),
    planted("the second consumer begins with what it does not see", "ends, window", WRONG,
            ("told(mem, turn, LEFT_OUT, plan.words) & 1, 0)", "0, 0)")),
    planted("marks are taken for the number of a slot", "ends, window", "IndexError|Assertion|Error",
            ("bits = bits & (SECOND_ALONE - 1)", "bits = bits & (2 * SECOND_ALONE - 1)")),
    Mutation("the step that comes first comes again", "gl.where(j <= tile.middle, j - 1, j)", "j",
             "ends, window", WRONG, module=hopper_tiles),
    planted("the next tile begins with the step of this one", "many tiles", WRONG,
            ("        tile = next_tile\n        step = first\n", "        tile = next_tile\n")),
    Mutation("a drawn tile is that of one pair", "number + producers * gl.num_programs(0)",
             "number + gl.num_programs(0)", "short", f"{WRONG}|AssertionError: the counter",
             module=tile_scheduler),
    planted("both pairs begin with one tile", "many tiles", WRONG,
            ("plan.pairs * gl.program_id(0) + PAIR", "plan.pairs * gl.program_id(0)")),
    Mutation("the counter is not set back", "gl.store(counter_ptr, 0)", "gl.store(counter_ptr, number)",
             "many tiles", "AssertionError: the counter", module=tile_scheduler),
    planted("the producer fills a slot that is in use", "apart", "Race",
            ("        acquire(mem, c + i, plan)\n", "")),
    Mutation("Q is overwritten while it is read",
             "        mbarrier.wait(mem.q_free.index(at), parity ^ 1)\n", "",
             "apart", "Race|Deadlock|Assertion", module=queries),
    Mutation("the second Q is overwritten while it is read",
             "        mbarrier.wait(mem.q_free.index(at), parity ^ 1)\n", "",
             "two Q, one step", "Race|Deadlock|Assertion", module=queries),
    Mutation("the parity of two Q is that of one", "* 2 + w, (turn >> 1) & 1", "* 2 + w, turn & 1",
             "two Q", "Race|Deadlock|Assertion", module=queries),
    planted("what is told of a tile is overwritten", "two Q, one step", "Race",
            ("copy_q(desc_q, mem, turn, next_tile, number < work.tiles, plan)\n"
             "        _tell(mem, turn, number >= work.tiles, next_tile, (tile.i_b, tile.i_h), plan)\n",
             "pass\n        _tell(mem, turn, number >= work.tiles, next_tile, (tile.i_b, tile.i_h), plan)\n"
             "        if plan.q_buffers > 1:\n"
             "            copy_q(desc_q, mem, turn, next_tile, number < work.tiles, plan)\n")),
    Mutation("two Q have one place", "return (turn & 1) * 2 + w,", "return w,",
             "two Q", "Race|Deadlock|Assertion", module=queries),
    planted("the next tile's Q is that of this tile", "two Q", WRONG,
            ("copy_q(desc_q, mem, turn, next_tile, number", "copy_q(desc_q, mem, turn, tile, number")),
    Mutation("Q is not waited for", "        mbarrier.wait(mem.q_full.index(at), parity)\n", "        pass\n",
             "two Q", "Race|Deadlock|Assertion", module=queries),
    planted("products read the first Q", "two Q", "Race|Assertion",
            ("    at, _ = q_place(turn, WG, plan)\n", "    at = WG\n")),
    Mutation("registers read the first Q", "matrix(mem.q, at).slice", "matrix(mem.q, WG).slice",
             "two Q in registers", "Race|Assertion", module=queries),
    planted("Q in registers without a fence", "Q in registers", "Race",
            ("            fence_async_shared()  # between the load of Q", "            pass  # of Q")),
    planted("the next tile's first keys are not waited for", "two Q", "Race|Deadlock|Assertion",
            ("        wait_k(mem, c, plan)\n    return", "        pass\n    return")),
    planted("the next tile's first product is waited for as the only one", "two Q in registers", "Race",
            ("products_of_scores(plan) if plan.ahead", "3 if plan.ahead")),
    planted("behind the last tile keys are waited for", "two Q", "Deadlock",
            ("turn, there, WG, plan)\n        row_sums", "turn, True, WG, plan)\n        row_sums")),
    planted("the next tile's first product has this tile's Q", "two Q", "Race|Assertion",
            ("_issue_scores(q_registers, mem, c, turn, WG, plan)\n\n\n@gluon.jit\ndef _issue_output",
             "_issue_scores(q_registers, mem, c, 0, WG, plan)\n\n\n@gluon.jit\ndef _issue_output")),
    Mutation("Q is given back before the output has left its place",
             "        tma.store_wait(0)  # the output of that tile has left\n", "        pass\n",
             "two Q", "Race", module=hopper_output),
    Mutation("the output leaves through the next tile's Q", "room(mem.q, q_place(turn, WG, plan)[0], desc_o)",
             "room(mem.q, q_place(turn + 1, WG, plan)[0], desc_o)", "two Q", "Race|Assertion",
             module=hopper_output),
    Mutation("the output leaves without a fence", "    fence_async_shared()\n", "", "two Q", "Race",
             module=hopper_output),
    Mutation("all heads have the mask of the first", "(i_b * work.mask_b + i_h * work.mask_h)",
             "(i_b * work.mask_b)", "by both", WRONG, module=hopper_tiles),
    planted("the output of a row that sees nothing is divided by 0", "none", WRONG,
            ("gl.where(empty, 1.0, row_sums)", "row_sums")),
    Mutation("words are overwritten without a fence", "    fence_async_shared()\n", "", "apart", "Race",
             module=bits),
    Mutation("bits of the pair's columns change places", "second[None, None, None, :]",
             "1 - second[None, None, None, :]", "apart", WRONG, module=bits),
]  # fmt: skip


K_ASKED = '        if t >= 2:\n            named_barrier("sync", K_FREE, 288)  # of column t - 2\n'
K_COPIED = "        copy_keys(desc_k, mem.k_full.index(t & 1), mem.k, keys, column, plan, set_of(t))\n"
V_ASKED = """\
                    if t >= 1:
                        named_barrier("sync", V_FREE, 288)  # of column t - 1
"""
V_COPIED = "                    copy_keys(desc_v, mem.v_full, mem.v, keys, column, plan)\n"
LEFT = "        if plan.persistent:\n            await_gradients(t, j)\n"
TURN = "        if plan.alternate:\n            await_start(i, WG)\n"


def backward(
    bug: str, call: str, verdict: str, edit: tuple[str, str], module: ModuleType = hopper_backward_kernel
) -> Mutation:
    return Mutation(bug, *edit, call, verdict, (), module)


MUTATIONS += [
    backward("words are not waited for", "many steps", "Race|Deadlock|Assertion",
             ("size + plan.parts * desc_words.block_type.nbytes, pred", "size, pred"), steps),
    backward("the second consumer reads the words of the first", "many steps", WRONG,
             ("mem.words.index(2 * place + WG)", "mem.words.index(2 * place)")),
    backward("no step has bits", "many steps", WRONG, ("word += (bits >= 0).to(gl.int32)", "word += 0"),
             steps),
    backward("dQ is added to the block of the step itself", "many steps", WRONG,
             ("gl.maximum(i - 1, 0) & 3", "i & 3")),
    backward("there are two places for words", "many steps", "Race|Assertion|IndexError",
             ("put_word(mem.told.index(j & 3)", "put_word(mem.told.index(j & 1)"), steps),
    *(backward(bug, call, "Race|Deadlock|Assertion", (asked, ""), module) for bug, call, asked, module in (
        ("Q is filled without asking", "leaves, many steps", "            acquire_q(j, plan)\n", steps),
        ("dO is filled without asking", "leaves, many steps", "            acquire(DO_FREE, j)\n", steps),
        ("Q is filled without asking, by a program that stays", "many steps",
         "                acquire_q(i, plan)\n", columns),
        ("dO is filled without asking, by a program that stays", "many steps",
         "                acquire(DO_FREE, i)\n", columns),
    )),
    backward("dS is not fenced", "128 many steps", "Race",
             ("    fence_async_shared()\n    tell_ds(j, WG)", "    tell_ds(j, WG)"), backward_pair),
    backward("dS is not waited for", "128 many steps", "Race|Deadlock",
             ("        await_ds(_before(i, j, plan), WG)\n", "")),
    backward("all heads of a group have the mask of the first", "by both", f"{WRONG}|Deadlock",
             ("column.number + g * work.mask_h * work.num_n", "column.number + 0 * g"), steps),
    backward("steps of the first head alone are counted", "one group", "Race|Deadlock|Assertion",
             ("count += gl.load(own + 1) - gl.load(own)", "count = gl.load(own + 1) - gl.load(own)"), steps),
    backward("dK is not scaled", "many steps", WRONG, ("(dk * sm_scale)", "(dk * 1.0)")),
    *(backward(bug, "128 gathered, a sequence", WRONG, edit, steps) for bug, edit in (
        ("both buffers have the first unit of keys", ("(16 * w)) & 0xFFFF) * 64", "(0 * w)) & 0xFFFF) * 64")),
        ("all key heads have the units of the first",
         ("work.units + column.number)", "work.units + column.i_n)")),
        ("gathered keys lie at the place of their tile",
         ("gl.load(work.units + column.number)", "2 * column.i_n + ((2 * column.i_n + 1) << 16)")),
    )),
    backward("gradients of gathered keys go to the first unit", "128 gathered, a sequence", WRONG,
             ("first_row(keys_of(mem, t), WG, plan)", "first_row(keys_of(mem, t), 0, plan)")),
    *(backward(bug, "wide many steps", verdict, edit, wide) for bug, verdict, edit in (
        ("the bits are those of the other slot", "Race|Assertion",
         ("mem.words.index(slot)", "mem.words.index(1 - slot)")),
        ("dQ is added to the block of the step after", "Race|Assertion",
         ("told(mem, j & 3) >> 1", "told(mem, (j + 1) & 3) >> 1")),
        ("P is not waited for", "Race|Deadlock|Assertion",
         ('        named_barrier("sync", P_FULL + slot, 256)\n', "")),
        ("dS is not waited for", "Race|Deadlock|Assertion",
         ('        named_barrier("sync", DS_FULL + slot, 256)\n', "")),
        ("dS is overwritten while it is read", "Race|Deadlock|Assertion",
         ('            named_barrier("sync", DS_FREE + slot, 256)\n', "            pass\n")),
        ("dV leaves before dP has read dO", "Race|Deadlock|Assertion",
         ('    named_barrier("sync", END, 256)\n', "")),
        ("dV is that of the keys after", WRONG, ("column.i_n * 64, 0]", "column.i_n * 64 + 64, 0]")),
    )),
    backward("dK is written before dV has left", "128 gathered", "Race",
             ("    tma.store_wait(0)\n    _store(desc_dk", "    _store(desc_dk")),
    *(backward(bug, "one step each", verdict, edit, columns) for bug, verdict, edit in (
        ("K is overwritten while gradients leave", "Race",
         (K_ASKED + K_COPIED, K_COPIED + K_ASKED)),
        ("V is overwritten while dP reads it", "Race", (V_ASKED + V_COPIED, V_COPIED + V_ASKED)),
        ("K has one set", f"Race|Deadlock|{WRONG}", ("return 2 * (t & 1)", "return 0 * (t & 1)")),
        ("the end is not told", f"Race|Deadlock|{WRONG}", ("COUNT), 0)", "COUNT), 1)")),
        ("the end is not told to those who wait for K", "Deadlock",
         ("mbarrier.arrive(mem.k_full.index(t & 1), count=1)", "pass")),
        ("dK and dV of a column go to the one before", WRONG, ("KEYS), keys)", "KEYS), keys - (keys > 0))")),
        ("K is waited for once", "Race|Deadlock",
         ("mem.k_full.index(t & 1), (t >> 1) & 1)", "mem.k_full.index(t & 1), 0 * t)")),
        ("K is free before the gradients have left", "Race",
         ("        tma.store_wait(0)\n", "        pass\n")),
        ("the last step forms S with K of its own", WRONG,
         ("gl.where(j == n - 1, t + 1, t)", "t")),
    )),
    backward("Q has two slots, and three barriers", "many steps", f"Race|Deadlock|{WRONG}",
             ("return slot_of(j, plan.q_stages)", "return j & 1"), steps),
    backward("delta has two slots", "many steps", "Race",
             ("mem.delta.index(slot))\n    if plan.copies_bias:\n        own_b",
              "mem.delta.index(j & 1))\n    if plan.copies_bias:\n        own_b"), steps),
    backward("words of columns have one place", "one step each", f"Race|{WRONG}",
             ("(t & (COLUMNS - 1)) * WORDS + w", "(t & 0) * WORDS + w"), steps),
    *(backward(bug, call, verdict, edit) for bug, call, verdict, edit in (
        ("V is waited for once", "one step each", "Race|Deadlock",
         ("mbarrier.wait(mem.v_full, t & 1)", "mbarrier.wait(mem.v_full, 0 * t)")),
        ("gradients are written while the other dQ reads K", "128 gathered", "Race",
         ("        meet(last)\n", "")),
        ("K is free behind the turn", "one step each", "Deadlock", (f"{LEFT}{TURN}", f"{TURN}{LEFT}")),
        ("dQ of a first step is added", "128 gathered", WRONG,
         ("add_sums(dq_ptr, block, dq, j > 0", "add_sums(dq_ptr, block, dq, i > 0")),
        ("a first step waits for dS of the column before", "128 gathered", "Deadlock",
         ("gl.where(j == 0, -1, i - 1)", "i - 1")),
        ("dQ of a last step is formed with the other K", "128 gathered", f"Race|{WRONG}",
         ("mem.k, last, WG, plan, own_k)", "mem.k, last, WG, plan, 2 - own_k)")),
        ("gradients leave from the other K", "one step each", "Race",
         ("left = mem.k.index(own_k + WG)", "left = mem.k.index(2 - own_k + WG)")),
    )),
    # Not in a call with bits: these come with a fence of their own.
    backward("LSE is overwritten without a fence", "256 random", "Race",
             ("        fence_async_shared()  # between the loads of LSE", "        pass  # of LSE"), wide),
    backward("both halves of a tile's keys have the bits of the first", "wide many steps", WRONG,
             ("else column.i_n & 1  # of", "else 0  # of"), steps),
]  # fmt: skip
RUNS = [("eager", 0), ("late", 0), *(("random", seed) for seed in range(20))]


def said_of(mutation: Mutation, mutants, order: str, seed: int) -> str:
    """What is said of a run; empty if nothing."""
    backwards = mutation.module in (hopper_backward_kernel, wide, columns, steps, backward_pair)
    run, calls = (check_backward, BACKWARD) if backwards else (check, CALLS)
    try:
        run(calls[mutation.caught_by], order, seed, mutants=mutants)
    except (Race, Deadlock, AssertionError, IndexError) as found:
        return f"{type(found).__name__}: {found}"
    return ""


def test_each_bug_has_its_place() -> None:
    check_places(MUTATIONS)


@pytest.mark.parametrize("mutation", first_of_each(MUTATIONS, attrgetter("kind")), ids=str)
def test_a_planted_bug_is_found(mutation):
    mutants = mutate(mutation)
    for order, seed in RUNS:
        said = said_of(mutation, mutants, order, seed)
        if said:
            assert re.match(mutation.verdict, said), said
            return
    pytest.fail(f"{len(RUNS)} runs did not reveal: {mutation.bug}")
