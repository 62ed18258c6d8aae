"""The forward Hopper kernel with `keep_shift` in the emulator, on scores that were made to mislead it: they
rise by just less or just more than it lets pass, in one row or column alone, or are no numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import families
import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import in_turn
from emulated import Call, mutate, on_the_cpu
from mutations import Mutation
from rising import BLOCKS, SCALE, N, levels_of, tensors

from attnlib.kernels import hopper
from attnlib.kernels.common import kept_shift
from attnlib.kernels.hopper.configs import M128N128, M192N128, HopperConfig, hopper_config
from attnlib.kernels.reference.dense import attention_fp64

pytestmark = INTERPRETER_REMARKS

KEPT = HopperConfig(N, 2, 2, 64, keep_shift=True)
LATE = replace(KEPT, late_wait=True, pin=True)
FAR = -2000.0
"""A score whose weight is 0 beside any other here."""
rising = partial(levels_of, far=FAR)


def forward(q, k, v, config: HopperConfig, causal: bool = False, mutants=None):
    """(out, lse) on the CPU."""
    params = Call(q.shape[-1], causal=causal, sm_scale=SCALE, config=config).params()
    with on_the_cpu(mutants=mutants):
        return families.forward(hopper, q, k, v, params)


def check(q, k, v, config: HopperConfig = KEPT, mutants=None) -> None:
    out, lse = forward(q, k, v, config, mutants=mutants)
    truth, truth_lse = attention_fp64(q, k, v, sm_scale=SCALE)
    torch.testing.assert_close(out.double(), truth, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-5, atol=1e-5)


EDGE = 2.0**-10
RISES = {
    "one key, the last weight that passes": (8.0, slice(17, 18)),
    "one key, just less": (8 - EDGE, slice(17, 18)),
    "one key, just more": (8 + EDGE, slice(17, 18)),
    "the last key of a block": (8 + EDGE, slice(63, 64)),
    "the first key of a block": (8 + EDGE, slice(0, 1)),
    "all keys, the last sum that passes": (4.0, slice(None)),
    "all keys, just less": (4 - EDGE, slice(None)),
    "all keys, just more": (4 + EDGE, slice(None)),
    "by a little in each block, by much over several": (3.0, slice(5, 6)),
    "beyond what a weight can be": (500.0, slice(17, 18)),
    "falling": (-9.0, slice(17, 18)),
}


@pytest.mark.parametrize(("name", "late"), in_turn(RISES, (False, True)))
def test_scores_at_the_edge(name: str, late: bool) -> None:
    check(*tensors(rising(*RISES[name])), LATE if late else KEPT)


def test_far_below_zero_then_far_above() -> None:
    levels = torch.full((BLOCKS, N), -30000.0)
    levels[1, 40], levels[0, 3] = 30000.0, 29999.0
    check(*tensors(levels.flatten()))


def one_row(row: int) -> tuple[torch.Tensor, ...]:
    """That row alone sees scores that rise."""
    q, k, v = tensors(rising(20.0, slice(33, 34)))
    q[0, 0, torch.arange(128) != row] = 0
    return q, k, v


@pytest.mark.parametrize("row", [0, 8, 23, 127])
def test_one_row_rises_alone(row: int) -> None:
    check(*one_row(row))


def up_and_down() -> tuple[torch.Tensor, ...]:
    """Scores of two rows of three rise, those of the others fall, each by more than a float's exponent."""
    q, k, v = tensors(torch.arange(BLOCKS).flip(0).repeat_interleave(N) * 100.0)
    q[:, :, ::3] *= -1
    k[..., 3] = torch.randn(k.shape[2], generator=torch.Generator().manual_seed(1))
    q[..., 3] = 1
    return q, k, v


def test_rows_that_rise_and_rows_that_fall() -> None:
    check(*up_and_down())


BUGS = {
    "a shift falls with the scores": (
        "max.f32 {found[row]}, a, {shift[row]}", "mov.b32 {found[row]}, a", up_and_down
    ),
    "a thread's second row is not asked": (
        "setp.gtu.or.f32 q, {parts[1]}, {most}, q", "setp.gtu.f32 q, {parts[0]}, {most}", lambda: one_row(8)
    ),
    "weights stay that float16 does not have": (
        "(127 + softmax.LAZY.value) << 23", "(127 + 16) << 23",
        lambda: tensors(rising(*RISES["one key, the last weight that passes"])),
    ),
    "both rows of a thread have the first one's new shift": ("c{i % 2}", "c0", lambda: one_row(8)),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    right, wrong, inputs = BUGS[name]
    mutants = mutate(Mutation(name, right, wrong, "", "", module=kept_shift))
    with pytest.raises(AssertionError):
        check(*inputs(), mutants=mutants)


@pytest.mark.parametrize(
    ("D", "config"),
    [*((D, hopper_config(D)) for D in (96, 192, 256)), (64, M192N128), (64, M128N128)],
    ids=lambda x: str(x) if isinstance(x, int) else f"{x.warpgroups}x64x{x.block_n}",
)
def test_other_tiles(D: int, config: HopperConfig) -> None:
    q, k, v = (torch.nn.functional.pad(x, (0, D - 64)) for x in tensors(rising(7.0, slice(10, 50))))
    q[..., D - 1] = torch.arange(128) % 5 - 2  # each row by steps of its own
    k[..., D - 1] = torch.arange(BLOCKS * N).flip(0) // N
    check(q, k, v, replace(config, keep_shift=True))


# ---------------------------------------------------------------- what is no number, and what is masked


BAD = float("nan"), float("inf"), float("-inf")


@pytest.mark.parametrize(("bad", "causal"), in_turn(product(BAD, (5, 100, 319)), (False, True)), ids=str)
def test_a_key_that_is_no_number(bad: tuple[float, int], causal: bool) -> None:
    """What is wrong in a key is wrong in each row that sees it, and in no other; as without the option."""
    value, place = bad
    rng = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 1, 320, 64, generator=rng).half() for _ in range(3))
    k[0, 0, place, 7] = value
    truth, truth_lse = attention_fp64(q, k, v, causal=causal, sm_scale=SCALE)
    out, lse = forward(q, k, v, KEPT, causal)
    plain, plain_lse = forward(q, k, v, replace(KEPT, keep_shift=False), causal)
    finite = truth_lse.isfinite()
    assert causal or value != value or finite.any()  # rows whose score is -inf: that key has no weight
    assert torch.equal(out.isnan().any(3), ~finite) and torch.equal(plain.isnan().any(3), ~finite)
    assert torch.equal(lse.isfinite(), finite) and torch.equal(plain_lse.isfinite(), finite)
    torch.testing.assert_close(out[finite].double(), truth[finite], rtol=1e-3, atol=1e-3)


def test_a_query_that_is_no_number() -> None:
    q, k, v = tensors(rising(9.0, slice(2, 3)))
    q[0, 0, 5, 9], q[0, 0, 40, 9] = float("nan"), float("inf")
    bad = torch.zeros(128, dtype=torch.bool)
    bad[[5, 40]] = True
    out, lse = forward(q, k, v, KEPT)
    truth, truth_lse = attention_fp64(q, k, v, sm_scale=SCALE)
    assert torch.equal(out[0, 0].isnan().any(1), bad)
    torch.testing.assert_close(out[0, 0, ~bad].double(), truth[0, 0, ~bad], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse[0, 0, ~bad].double(), truth_lse[0, 0, ~bad], rtol=1e-5, atol=1e-5)
