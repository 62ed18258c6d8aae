"""The FP8 forward kernel, line by line as it is, in the emulator: results, and no race or deadlock."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import in_turn
from emulated import ORDERS
from emulated_fp8 import Call, check

from attnlib.kernels.hopper.configs_fp8 import fp8_config
from attnlib.params import Varlen

pytestmark = INTERPRETER_REMARKS


@pytest.mark.parametrize(("case", "order"), in_turn(product((True, False), (64, 128, 256)), ORDERS), ids=str)
def test_forward(case: tuple[bool, int], order: str) -> None:
    causal, D = case
    check(Call(D, causal=causal), order)


CALLS = {
    "grouped heads, batches": Call(64, 4, 2, 70, 90, B=2, mean=3.0),
    "bfloat16": Call(128, 2, 1, out_dtype=torch.bfloat16, mean=1.0),
    "float32": Call(128, 1, 1, out_dtype=torch.float32, mean=100.0),
    "float32, 256 columns": Call(256, 1, 1, 70, 90, out_dtype=torch.float32, mean=100.0),
    "not centered": Call(64, 4, 2, 70, 90, B=2, mean=1.0, center=False),
    "no LSE": Call(128, return_lse=False),
    "a negative scale": Call(64, sm_scale=-0.1),
    "one row, one key": Call(64, 1, 1, 1, 1),
    "one row": Call(128, 2, 1, 1, 333),
    "one key": Call(64, 2, 1, 200, 1),
    "rows that see nothing": Call(128, 1, 1, 300, 100, mean=3.0),
    "many tiles": Call(64, 6, 2, 300, 150, mean=3.0),
    "a head dimension between the widths": Call(40, 2, 1, 150, 170, mean=3.0),
    "a head dimension of 200": Call(200, 1, 1, 100, 150),
    "a scale per head": Call(128, 2, 1, 200, 300, B=2, scaling="head"),
    "one scale": Call(64, 2, 1, 200, 300, scaling="tensor", rotate=False),
    "blocks of different size": Call(64, 2, 1, 300, 500, spread=6.0),
    "blocks of different size, 256 columns": Call(256, 1, 1, 130, 300, spread=6.0),
    "large scores": Call(64, 1, 1, 130, 300, causal=False, sm_scale=2.0),
    "window": Call(64, 2, 1, 200, 300, causal=True, window=(100, -1)),
    "window on both sides": Call(128, 1, 1, 200, 300, causal=False, window=(70, 33)),
    "window on the right": Call(64, 1, 1, 200, 300, causal=False, window=(-1, 40)),
    "window on the left": Call(256, 1, 1, 100, 300, causal=False, window=(70, -1)),
    "window of one key": Call(64, 1, 1, 150, 150, causal=True, window=(0, 0)),
    "varlen": Call(64, 2, 1, varlen=((40, 70), (0, 5), (300, 90), (1, 300)), mean=3.0),
    "varlen, dense": Call(128, 1, 1, varlen=((40, 70), (150, 0), (130, 129)), causal=False, mean=3.0),
    "varlen, 256 columns": Call(256, 2, 1, varlen=((70, 70), (100, 130)), spread=4.0, mean=3.0),
    "varlen, not centered": Call(64, 2, 1, varlen=((40, 70), (30, 90)), center=False),
    "varlen, a window": Call(64, 1, 1, varlen=((140, 170), (200, 90)), window=(50, -1), scaling="head"),
    "own queries": Call(64, 4, 2, 300, 170, B=2, spread=6.0, own_queries=True),
    "own queries, 128 columns": Call(128, 2, 1, 300, 170, spread=6.0, own_queries=True),
    "own queries, dense": Call(128, 1, 1, 130, 129, causal=False, dtype=torch.bfloat16, own_queries=True),
    "own queries, float32": Call(128, 1, 1, 130, 129, mean=9.0, out_dtype=torch.float32, own_queries=True),
    "own queries, not rotated": Call(128, 2, 1, 100, 70, rotate=False, own_queries=True),
    "own queries of 40 columns": Call(40, 2, 1, 70, 90, own_queries=True),
    "own queries of 104 columns": Call(104, 2, 1, 70, 90, own_queries=True),
    "own queries, varlen": Call(
        128, 2, 1, varlen=((40, 70), (0, 5), (300, 90), (1, 300)), spread=4.0, own_queries=True
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "order"), in_turn(CALLS, ("late", "random")))
def test_calls(name: str, order: str) -> None:
    check(CALLS[name], order, seed=1)


def test_rows_without_keys_get_no_mean() -> None:
    out, lse = check(CALLS["rows that see nothing"])
    assert (out[0, 0, :200] == 0).all() and (lse[0, 0, :200] == -torch.inf).all()
    out, _ = check(CALLS["varlen, dense"])
    assert (out[40:190] == 0).all() and (out[190:].abs().amax((1, 2)) > 1).all()


@pytest.mark.parametrize("sm_scale", [0.0, -1e-38])
@pytest.mark.parametrize("own_queries", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_a_product_of_scales_below_the_smallest_number(
    causal: bool, own_queries: bool, sm_scale: float
) -> None:
    """Every key that a row sees has the same weight; a hidden one has none, and is not 0 * -inf."""
    call = Call(64, 1, 1, 70, 200, causal=causal, sm_scale=sm_scale, own_queries=own_queries)
    q, k, v = call.tensors()
    check(call, tensors=(0.01 * q, 0.01 * k, v))


def test_queries_of_zeros_among_small_keys() -> None:
    """Rows of padding, each with a scale of its own."""
    call = Call(128, 1, 1, 150, 150, own_queries=True)
    q, k, v = (x.bfloat16() for x in call.tensors())
    q[:, :, 100:] = 0
    check(call, tensors=(q, 1e-6 * k, v))


PLAIN = replace(
    fp8_config(128), block_n=64, stages=2, o_columns=64, q_columns=0, late_wait=False, pin=False, joint=False
)
FLAGS = [
    {}, {"joint": True}, {"named": True}, {"late_wait": True, "pin": True}, {"block_n": 128},
    {"q_columns": 64}, {"q_columns": 32}, {"stages": 1}, {"stages": 8}, {"o_columns": 32},
    {"warpgroups": 3, "stages": 4, "joint": True, "block_n": 128}, {"warpgroups": 4},
    {"warpgroups": 3}, {"named": True, "block_n": 128, "pin": True},
]  # fmt: skip


WAYS = list(product((True, False), ("late", "random")))


@pytest.mark.parametrize(("flags", "way"), in_turn(FLAGS, WAYS), ids=str)
def test_configurations(flags: dict, way: tuple[bool, str]) -> None:
    (causal, order), config = way, replace(PLAIN, **flags)
    check(Call(64, 2, 1, 300, 400, causal=causal, config=config, return_lse=True), order, seed=2)


class Columns(Call):
    """Its offsets are columns of tables, which are not contiguous."""

    def _varlen(self):
        *offsets, longest_q, longest_k = super()._varlen()
        return Varlen(*(torch.stack([x, x + 1], 1)[:, 0] for x in offsets), longest_q, longest_k)


def test_offsets_need_not_be_contiguous() -> None:
    check(Columns(64, 1, 1, varlen=((40, 70), (0, 5), (70, 90))))


def test_a_value_that_is_nan_stays_with_its_sequence() -> None:
    """Rows that see it are NaN; those of the sequences beside it in memory are what they are without it."""
    call = Call(64, 1, 1, varlen=((40, 40), (70, 70), (50, 50)), causal=False)
    q, k, v = call.tensors()
    v[50] = torch.nan  # in the second sequence
    out, _ = check(call, tensors=(q, k, v))
    assert out[40:110].isnan().all() and out[:40].isfinite().all() and out[110:].isfinite().all()
