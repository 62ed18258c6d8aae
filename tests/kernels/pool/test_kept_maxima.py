"""The Hopper forward kernel that keeps maxima and shifts (`attnlib.kernels.hopper.maxima`), in the emulator:
largest scores from largest weights, on scores that send it the slow way in the middle of a row. The output
has the bits of the kernel that keeps no maxima."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import families
import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import in_turn
from emulated import ORDERS, mutate, on_the_cpu
from mutations import Mutation
from rising import BLOCKS, SCALE, N, levels_of, tensors

from attnlib.kernels import hopper
from attnlib.kernels.common import kept_shift
from attnlib.kernels.common.signature import signature
from attnlib.kernels.hopper import forward_kernel, launch, maxima, pooled
from attnlib.kernels.hopper.configs import M128N128, M192N128, M256N64, HopperConfig, hopper_config
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.params import Params, mask_window

pytestmark = INTERPRETER_REMARKS

EARLY = HopperConfig(64, 2, 2, 64, keep_shift=True)
WHOLE = replace(EARLY, block_n=128)  # both units at once
CONFIGS = {
    "64 keys, early": EARLY, "64 keys, late": replace(EARLY, late_wait=True, pin=True),
    "128 keys, early": WHOLE, "128 keys, late": replace(WHOLE, late_wait=True, pin=True),
}  # fmt: skip
TILES = {
    "M256N64": (64, M256N64), "M192N128": (64, M192N128), "M128N128": (64, M128N128),
    "128": (128, hopper_config(128)), "256": (256, hopper_config(256)),
}  # fmt: skip
HIDDEN = 126
"""A weight that is so many powers of two below another one of its row may be 0."""
FAR = -2000.0
rising = partial(levels_of, far=FAR)


def truth_of(q, k, causal: bool, sm_scale: float) -> torch.Tensor:
    """The largest score of each row and 64 keys in units of log2, fp64 (B, H, units, rows); -inf where a row
    sees none of these keys."""
    scores = sm_scale / SCALE * q.double() @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).double().mT
    if causal:
        place = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
        scores = scores.masked_fill(torch.arange(k.shape[2]) > place, -torch.inf)
    units = -(-k.shape[2] // 64)
    scores = torch.nn.functional.pad(scores, (0, 64 * units - k.shape[2]), value=-torch.inf)
    return scores.unflatten(3, (units, 64)).amax(4).mT


def run(q, k, v, config: HopperConfig, causal: bool, sm_scale: float, mutants=None, order="random"):
    """(output, LSE, maxima) and (output, LSE) without maxima, and what ran with them."""
    params = Params(mask_window(causal, None), sm_scale, return_lse=True, config=config)
    with on_the_cpu(mutants=mutants):
        plain = families.forward(hopper, q, k, v, params)
    with on_the_cpu(order, mutants=mutants) as kernels:
        found = pooled.forward(q, k, v, params)
    return found, plain, kernels["attention_forward_hopper"]


def check(q, k, v, config: HopperConfig, causal=False, sm_scale=SCALE, mutants=None, order="random"):
    """AssertionError for a wrong output or a wrong maximum; returns what ran.

    A maximum is log2(weight) + shift. The weight is exact to 2^-22, as its logarithm is, of its magnitude
    where that is above 1; shift and score are rounded to 24 bits, each some times, and so is each sum of the
    score's products. Where a weight is 0 or, in
    the emulator, no normal number, the score is far below the LSE, and -inf or as far below."""
    (out, lse, found), (plain, plain_lse), kernel = run(q, k, v, config, causal, sm_scale, mutants, order)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse), "other bits"
    wanted, lse = truth_of(q, k, causal, sm_scale), lse.double()[:, :, None] / SCALE
    found = found[:, :, : wanted.shape[2], : wanted.shape[3]].double()
    truth, _ = attention_fp64(q, k, v, causal=causal, sm_scale=sm_scale)
    torch.testing.assert_close(out.double(), truth, rtol=1e-2, atol=1e-2)
    seen = wanted > -torch.inf
    below = lse - wanted
    lost = (below > HIDDEN) & (found < lse - HIDDEN + 1)
    heads = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    terms = (sm_scale / SCALE * q.double().abs() @ heads.double().abs().mT).abs().amax(3)[:, :, None]
    budget = 2.0**-21 * (2 + below.abs() + wanted.abs() + lse.abs() + terms)
    assert (((found - wanted).abs() <= budget) | lost)[seen].all(), "a maximum is off"
    return kernel


# ---------------------------------------------------------------- scores that mislead


def normal() -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(3)
    return tuple(torch.randn(1, 1, n, 64, generator=rng).half() for n in (128, BLOCKS * N, BLOCKS * N))


def up_and_down() -> tuple[torch.Tensor, ...]:
    """Scores of two rows of three rise, those of the others fall, each by more than a float's exponent; in
    each 64 keys another one is the largest."""
    q, k, v = tensors(torch.arange(BLOCKS).flip(0).repeat_interleave(N) * 150.0)
    q[:, :, ::3] *= -1
    k[..., 3] = torch.randn(k.shape[2], generator=torch.Generator().manual_seed(1))
    q[..., 3] = 1
    return q, k, v


def one_row() -> tuple[torch.Tensor, ...]:
    """A row rises alone, so that the others of its warp go the slow way with it."""
    q, k, v = tensors(rising(20.0, slice(33, 34)))
    q[0, 0, torch.arange(128) != 23] = 0
    k[..., 3] = torch.randn(k.shape[2], generator=torch.Generator().manual_seed(1))
    q[..., 3] = 1
    return q, k, v


INPUTS = {
    "normal": normal,
    "rising by less than a look-up needs": lambda: tensors(rising(3.0, slice(5, 6))),
    "rising by more": lambda: tensors(rising(20.0, slice(63, 64))),
    "rising beyond what a weight can be": lambda: tensors(rising(500.0, slice(0, 1))),
    "rising in the middle of a row": lambda: tensors(
        rising(0.0, slice(None)) + torch.tensor([0.0, 0, 300, 0, 0]).repeat_interleave(N)
    ),
    "falling to weights of 0": lambda: tensors(rising(-200.0, slice(17, 18))),
    "up and down": up_and_down,
    "one row": one_row,
}


@pytest.mark.parametrize(("case", "causal"), in_turn(product(INPUTS, CONFIGS), (False, True)), ids=str)
def test_inputs(case: tuple[str, str], causal: bool) -> None:
    name, config = case
    check(*INPUTS[name](), CONFIGS[config], causal)


@pytest.mark.parametrize(("tile", "dtype"), in_turn(TILES, (torch.float16, torch.bfloat16)), ids=str)
def test_tiles(tile: str, dtype: torch.dtype) -> None:
    """Two heads on one, sums of the scores' signs, a diagonal, more rows than a tile has."""
    D, config = TILES[tile]
    rng = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, h, n, D, generator=rng) for h, n in ((2, 270), (1, 334), (1, 334)))
    q[..., 0], k[..., 0] = torch.arange(270) % 5 - 2.0, torch.arange(334) // 64 * 40.0
    q, k, v = (x.to(dtype) for x in (q, k, v))
    check(q, k, v, config, True, 0.3)
    check(q, k, v, config, False, -0.3)


@pytest.mark.parametrize(("config", "order"), in_turn(["64 keys, early", "128 keys, late"], ORDERS))
def test_orders(config: str, order: str) -> None:
    check(*up_and_down(), CONFIGS[config], order=order).repeat(order, 1)


@pytest.mark.parametrize("config", ["64 keys, early", "128 keys, early", "128 keys, late"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_rows(value: float, config: str) -> None:
    """Of rows that do not see it, and of other rows of the same warp, nothing changes."""
    q, k, v = normal()
    q[0, 0, 21, 5], k[0, 0, 280, 5] = value, value
    (_, lse, found), (_, plain_lse), _ = run(q, k, v, CONFIGS[config], True, 0.1)
    assert torch.equal(lse.isfinite(), plain_lse.isfinite())
    good = lse[0, 0].isfinite()
    assert 0 < good.sum() < 128
    wanted = truth_of(q, k, True, 0.1)[0, 0, :, good]
    seen = wanted > -torch.inf
    torch.testing.assert_close(found[0, 0, :5, :128][:, good][seen].double(), wanted[seen], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("S_q", "S_k", "units"), [(256, 256, 2), (128, 320, 2), (256, 300, 0)])
def test_maxima_are_those_of_weights_where_shifts_are_kept(S_q: int, S_k: int, units: int) -> None:
    """As the call without maxima keeps them, or the bits were others."""
    q, k = (torch.zeros(1, 2, n, 128, dtype=torch.float16) for n in (S_q, S_k))
    call = signature(Params(mask_window(True, None), 0.1, config=hopper_config(128)), q, k, q, k, k)
    plan, plain = pooled.plan_of(call), launch.plan_of(call)
    assert plan.units.value == units and plain.units.value == 0
    assert plan.keep_shift.value == plain.keep_shift.value == (units > 0)


# ---------------------------------------------------------------- planted bugs

BUGS = [
    Mutation("the slow way keeps weights that were too large", "mov.b32 {new[row]}, 0f00000000",
             "mov.b32 {new[row]}, {new[row]}", "rising by more", "", module=kept_shift),
    Mutation("the slow way takes the other row's weights", "max.f32 {top[i % 2]}, {top[i % 2]}, {weight}",
             "max.f32 {top[1 - i % 2]}, {top[1 - i % 2]}, {weight}", "up and down", "", module=kept_shift),
    Mutation("the slow way gives both units to the first", "found_tops[i * units // m :][:1]",
             "found_tops[:1]", "one row", "", module=kept_shift),
    Mutation("the slow way gives all weights to all units", "found_tops[i * units // m :][:1]", "found_tops",
             "up and down", "", module=kept_shift),
    Mutation("half of the weights are looked at", "weights[1].to(gl.int32", "weights[0].to(gl.int32",
             "normal", "", module=kept_shift),
    Mutation("the second half is the first", "return left + right", "return left + left", "normal", "",
             module=kept_shift),
    Mutation("the shift is of the other row", "gl.where(odd, lower, upper)", "gl.where(odd, upper, lower)",
             "up and down", "", module=maxima),
    Mutation("a thread stores what its partner keeps", "gl.where(second, b, a), _ex",
             "gl.where(second, a, b), _ex", "normal", "", module=maxima),
    Mutation("a part is missing", "top = _of_two(top, _of_two(upper, lower, odd, 1), second, 2)",
             "top = gl.where(second, _of_two(upper, lower, odd, 1), top)", "normal", "", module=maxima),
    Mutation("blocks are stored in the order of the visit", "-plan.units * rows", "plan.units * rows",
             "normal", "outside of its tensor", module=maxima),
    Mutation("the shift is left out", "_log2(top.to(gl.float32, bitcast=True)) + gl.where(odd, lower, upper)",
             "_log2(top.to(gl.float32, bitcast=True))", "normal", "", module=maxima),
    Mutation("the last block is not stored", "            maxima.keep(pending, shift, tile, plan)\n",
             "            pass\n", "normal", "", module=forward_kernel),
    Mutation("the shift is that of the block after", "        at = maxima.keep(pending, shift, tile, plan)\n",
             "        pass\n", "rising by more", "", (("        p = words, at + tops\n",
             "        p = words, maxima.keep(pending, shift, tile, plan) + tops\n"),), forward_kernel),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_planted_bug_is_found(bug: Mutation) -> None:
    mutants = mutate(bug)
    with pytest.raises((AssertionError, IndexError), match=bug.verdict or "a maximum is off"):
        check(*INPUTS[bug.caught_by](), CONFIGS["128 keys, late"], mutants=mutants)
