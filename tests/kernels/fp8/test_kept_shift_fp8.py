"""The FP8 kernel with `keep_shift` in the emulator, on scores that were made to mislead it: weights just
below and just above the largest that e4m3 has, in one row or column alone, or that are no numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import INTERPRETER_REMARKS
from chosen import in_turn
from emulated import mutate, on_the_cpu
from emulated_fp8 import Call, check
from mutations import Mutation
from rising import BLOCKS, N, levels_of

from attnlib.kernels.common import kept_shift
from attnlib.kernels.common.fp8 import Fp8
from attnlib.kernels.hopper import launch_fp8 as launch
from attnlib.kernels.hopper.configs import HopperConfig
from attnlib.kernels.hopper.configs_fp8 import fp8_config
from attnlib.kernels.reference import fp8 as reference

pytestmark = INTERPRETER_REMARKS

SCALE = 0.6931471805599453  # so that a score is the exponent of a weight, a power of two
D = 64
KEPT = replace(
    fp8_config(128), block_n=N, stages=2, o_columns=64, q_columns=0, late_wait=False, pin=False,
    keep_shift=True,
)  # fmt: skip
LATE = replace(KEPT, late_wait=True, pin=True)
FAR = -400.0
"""A score whose weight is 0 beside any other here."""
rising = partial(levels_of, far=FAR)
TERMS = 5
"""Numbers of e4m3 whose sum is a score."""


def operand(x: torch.Tensor, role: str) -> Fp8:
    """x (1, 1, S, D) of numbers that e4m3 has."""
    data = x.to(torch.float8_e4m3fn)
    assert torch.equal(data.to(x.dtype).nan_to_num(7), x.nan_to_num(7))
    rows = x.shape[2]
    if role == "v":
        data = F.pad(x, (0, 0, 0, -rows % 16)).unflatten(2, (-1, 16))[:, :, :, reference.key_order()]
        data = data.flatten(2, 3).mT.contiguous().to(torch.float8_e4m3fn)
    scale = torch.ones(1, 1) if role == "v" else torch.ones(1, 1, 1).expand(1, 1, -(-rows // 64))
    return Fp8(data, scale, role, "tensor", False, x.shape[3], torch.float16, rows)


def tensors(levels: torch.Tensor, rows: int = 128) -> list[torch.Tensor]:
    """q, k, v of one head. Scores are `levels`, one for each key; the keys of each block have their own
    column of v, so that the output says how much weight each block has."""
    q, k, v = (torch.zeros(1, 1, n, D) for n in (rows, len(levels), len(levels)))
    rest = levels.clone()
    for d in range(TERMS):
        k[0, 0, :, d] = rest.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        rest = rest - k[0, 0, :, d]
    assert rest.abs().max() < 2e-3
    q[..., :TERMS] = 1
    v[0, 0, torch.arange(len(levels)), torch.arange(len(levels)) // N] = 1
    return [q, k, v]


def forward(q, k, v, config: HopperConfig, mutants=None):
    """(out, LSE) of the kernel and of fp64."""
    params = Call(D, causal=False, sm_scale=SCALE, config=config).params()
    operands = [operand(x, role) for x, role in zip((q, k, v), "qkv", strict=True)]
    with on_the_cpu(mutants=mutants):
        found = launch.forward(*operands, params, torch.float32)
    return found, reference.forward(*operands, params, torch.float64, reference.Rounding(offset=None))


def judge(q, k, v, config: HopperConfig = KEPT, mutants=None) -> None:
    """A weight is rounded by 1/16 at most, where it is not lost beside others; the row sum is exact."""
    (out, lse), (truth, truth_lse) = forward(q, k, v, config, mutants)
    torch.testing.assert_close(out.double(), truth, rtol=1 / 16 + 1e-4, atol=2.0**-15 * N)
    torch.testing.assert_close(lse.double(), truth_lse.double(), rtol=1e-5, atol=1e-5)


EDGE = 2.0**-6
RISES = {
    "one key, just less than the largest weight": (2.8125 - EDGE, slice(17, 18)),
    "one key, just more": (2.8125 + EDGE, slice(17, 18)),
    "one key, more": (3.5, slice(17, 18)),
    "the last key of a block": (4.0, slice(63, 64)),
    "the first key of a block": (4.0, slice(0, 1)),
    "all keys, the last sum of four that passes": (0.8125 - EDGE, slice(None)),
    "all keys, just more": (0.8125 + EDGE, slice(None)),
    "flat": (0.0, slice(None)),
    "by a little in each block, by much over several": (1.25, slice(5, 6)),
    "beyond what a weight can be": (90.0, slice(17, 18)),
    "falling": (-3.5, slice(17, 18)),
}


@pytest.mark.parametrize(("name", "late"), in_turn(RISES, (False, True)))
def test_scores_at_the_edge(name: str, late: bool) -> None:
    judge(*tensors(rising(*RISES[name])), LATE if late else KEPT)


def test_far_below_zero_then_far_above() -> None:
    levels = torch.full((BLOCKS, N), -1000.0)
    levels[1, 40], levels[0, 3] = 1000.0, 999.0
    judge(*tensors(levels.flatten()))


def one_row(row: int) -> list[torch.Tensor]:
    """That row alone sees scores that rise."""
    q, k, v = tensors(rising(12.0, slice(33, 34)))
    q[0, 0, torch.arange(128) != row] = 0
    return [q, k, v]


@pytest.mark.parametrize("row", [0, 8, 23, 127])
def test_one_row_rises_alone(row: int) -> None:
    judge(*one_row(row))


def up_and_down() -> list[torch.Tensor]:
    """Scores of two rows of three rise, those of the others fall, each by more than a float's exponent."""
    q, k, v = tensors(torch.arange(BLOCKS).flip(0).repeat_interleave(N) * 100.0)
    q[:, :, ::3] *= -1
    return [q, k, v]


def test_rows_that_rise_and_rows_that_fall() -> None:
    judge(*up_and_down())


def places(column: int) -> list[torch.Tensor]:
    """One key rises, and the weights of its neighbors are others: each place of a word has its own."""
    levels = torch.full((BLOCKS, N), FAR)
    levels[:, column] = 7.0 * torch.arange(BLOCKS).flip(0)
    q, k, v = tensors(levels.flatten())
    v[0, 0, :, BLOCKS] = 1.0 + (torch.arange(N) + torch.arange(N) // 8).repeat(BLOCKS) % 8 / 8
    return [q, k, v]


@pytest.mark.parametrize("column", range(0, 64, 7))
def test_each_place_of_a_word(column: int) -> None:
    judge(*places(column))
    judge(*places(column), LATE)


# ---------------------------------------------------------------- planted bugs

SLOW = "neg.f32 c{row}, {found[row]}", "mov.b32 c{row}, 0f7FC00000"
"""With it the slow path leaves no number."""
BUGS = {
    "a shift falls with the scores": (
        "max.f32 {found[row]}, a, {shift[row]}", "mov.b32 {found[row]}, a", up_and_down
    ),
    "a thread's second row is not asked": (
        "max.s32 both, {largest[0]}, {largest[1]}", "max.s32 both, {largest[0]}, {largest[0]}",
        lambda: one_row(8),
    ),
    "weights are cut off": (
        "_bits(fp8.LARGEST)", "_bits(16 * fp8.LARGEST)", lambda: tensors(rising(3.5, slice(17, 18)))
    ),
    "a new shift has no room": (
        "_bits(fp8.OFFSET)", "_bits(fp8.OFFSET + 4)", lambda: tensors(rising(30.0, slice(17, 18)))
    ),
    "weights of two of four columns are forgotten": (
        "(weights[0] + weights[1]) + (weights[2] + weights[3])", "(weights[0] + weights[1])",
        lambda: tensors(rising(4.0, slice(63, 64))),
    ),
    "both rows of a thread have the first one's new shift": ("c{i % 2}", "c0", lambda: one_row(8)),
    "pairs of weights are swapped": ("{{low, high}}", "{{high, low}}", lambda: places(14)),
    "the second half is not asked": (
        "largest = gl.maximum(largest, gl.convert_layout(larger, largest.type.layout))",
        "largest = largest", lambda: tensors(rising(6.0, slice(63, 64))),
    ),
}  # fmt: skip


def planted(right: str, wrong: str):
    return mutate(Mutation("planted", right, wrong, "", "", module=kept_shift))


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    right, wrong, inputs = BUGS[name]
    with pytest.raises(AssertionError):
        judge(*inputs(), LATE, mutants=planted(right, wrong))


@pytest.mark.parametrize("config", [KEPT, LATE], ids=["early", "late"])
def test_where_scores_rise_little_no_step_takes_the_slow_path(config: HopperConfig) -> None:
    """All weights of a row may be as large as its largest; a sum of all that a thread has would be more."""
    for step in (0.0, 0.1875, -1.0):
        judge(*tensors(rising(step, slice(None))), config, planted(*SLOW))
    with pytest.raises(AssertionError):
        judge(*tensors(rising(1.5, slice(None))), config, planted(*SLOW))


# ---------------------------------------------------------------- what is no number; other calls


@pytest.mark.parametrize("place", [5, 100, 319])
@pytest.mark.parametrize("value", [float("nan"), -448.0])
def test_a_key_that_is_no_number(value: float, place: int) -> None:
    """e4m3 has no infinity. A NaN spoils each row that sees it, as without the option."""
    q, k, v = tensors(rising(3.0, slice(10, 50)))
    k[0, 0, place, TERMS] = value
    q[..., TERMS] = 1
    (out, lse), (truth, truth_lse) = forward(q, k, v, KEPT)
    assert torch.equal(out.isnan(), truth.isnan()) and torch.equal(lse.isnan(), truth_lse.isnan())
    if value == value:
        judge(q, k, v)


def test_a_query_that_is_no_number() -> None:
    q, k, v = tensors(rising(9.0, slice(2, 3)))
    q[0, 0, 5, 9] = float("nan")
    bad = torch.zeros(128, dtype=torch.bool)
    bad[5] = True
    (out, lse), (truth, truth_lse) = forward(q, k, v, KEPT)
    assert torch.equal(out[0, 0].isnan().any(1), bad) and torch.equal(lse[0, 0].isnan(), bad)
    torch.testing.assert_close(out[0, 0, ~bad].double(), truth[0, 0, ~bad], rtol=1 / 16, atol=1e-3)


CALLS = {
    "causal": Call(64), "causal, 128 columns": Call(128, 2, 1, out_dtype=torch.bfloat16, mean=1.0),
    "256 columns": Call(256, 1, 1, 130, 300, spread=6.0, out_dtype=torch.float32),
    "256 columns, dense": Call(256, 1, 1, 130, 300, causal=False),
    "blocks of different size": Call(64, 2, 1, 300, 500, spread=6.0),
    "large scores": Call(64, 1, 1, 130, 300, causal=False, sm_scale=2.0),
    "a negative scale": Call(64, sm_scale=-0.1),
    "rows that see nothing": Call(128, 1, 1, 300, 100, mean=3.0),
    "one key": Call(64, 2, 1, 200, 1),
    "one scale": Call(64, 2, 1, 200, 300, scaling="tensor", rotate=False),
    "varlen": Call(64, 2, 1, varlen=((40, 70), (0, 5), (300, 90), (1, 300)), mean=3.0),
    "window": Call(64, 2, 1, 200, 300, causal=True, window=(100, -1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    """Windows on the left and diagonals that cut two blocks do without; the others keep their shifts."""
    call = CALLS[name]
    width = next(width for width in (64, 128, 256) if call.D <= width)
    call = replace(call, config=replace(fp8_config(width), keep_shift=True))
    for order in ("late", "random"):
        check(call, order, seed=1)


def test_outliers_and_a_sink() -> None:
    """Rows that one key dominates, and operands with a few large numbers."""
    call = Call(128, 1, 1, 128, 640, causal=False, config=replace(fp8_config(128), keep_shift=True))
    rng = torch.Generator().manual_seed(4)
    tensors = [torch.randn(1, 1, n, 128, generator=rng) for n in (128, 640, 640)]
    sink = [x.clone() for x in tensors]
    sink[1][:, :, 0] = 4 * sink[0].mean(2) / sink[0].mean(2).norm() * 128**0.5
    for x in tensors:
        x += 10 * torch.randn(x.shape, generator=rng) * (torch.rand(x.shape, generator=rng) < 0.001)
    for given in (tensors, sink):
        check(call, tensors=[x.half() for x in given])


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_the_kernel_is_the_model_of_kept_shifts(scale: float) -> None:
    """Not only as exact: the same shifts, so the same rounded weights. Of these a few may be others, where
    an exponential in float32 is next to the middle of two neighbors."""
    config = replace(fp8_config(128), keep_shift=True)
    call = Call(128, 1, 1, 128, 1024, causal=False, sm_scale=scale * 128**-0.5, config=config)
    call = replace(call, out_dtype=torch.float32)
    operands = call.operands(*call.tensors())
    with on_the_cpu():
        out, _ = launch.forward(*operands, call.params(), torch.float32)
    exact, model, lagging = (
        reference.forward(*operands, call.params(), torch.float64, rounding)[0]
        for rounding in (
            reference.Rounding(offset=None), reference.Rounding(kept=True), reference.Rounding()
        )
    )  # fmt: skip
    error = (model - exact).pow(2).mean().sqrt()
    assert (out - model).pow(2).mean().sqrt() < 0.1 * error
    if scale == 1.0:
        assert (out - lagging).pow(2).mean().sqrt() > 0.1 * error, "the models do not differ here"
