"""Checks of the exercises of chapter 04."""

import math
from functools import partial

import numpy as np
import torch

from attnlib.bench import shapes
from attnlib.bench.oracle import judge, make_inputs
from attnlib.book import lesson
from attnlib.book.exercises import judge_kernel


def check_balanced_head_dim(answer):
    for flop, exp, expected in ((4096, 16, 64), (8192, 16, 128), (8192, 32, 64), (2048, 16, 32)):
        got = answer(flop, exp)
        assert math.isclose(got, expected), (
            f"{flop} FLOP and {exp} exponentials per clock: expected {expected}, got {got}"
        )


def check_lse_from_raw(answer):
    torch.manual_seed(0)
    for sm_scale in (0.125, 1.0, 3.0):
        scores = 10 * torch.randn(5, 200, dtype=torch.float64)
        b_m = scores.amax(1)
        b_l = torch.exp2((scores - b_m[:, None]) * (sm_scale * math.log2(math.e))).sum(1)
        expected = torch.logsumexp(scores * sm_scale, 1)
        got = answer(b_m.float(), b_l.float(), sm_scale).double()
        error = (got - expected).abs().max().item()
        assert error <= 1e-4 * expected.abs().max().item(), (
            f"sm_scale = {sm_scale}: expected {expected[0]:.4f} for the first row, got {got[0]:.4f}"
        )
    empty = answer(torch.tensor([-math.inf]), torch.tensor([0.0]), 0.125)
    assert empty.item() == -math.inf, f"a row without keys: expected -inf, got {empty.item()}"


def check_attention_any_scale(answer):
    attention = lesson.load_kernel("04_exp2").attention
    for sm_scale in (0.2, -0.2, -2.0, 0.0):
        for causal in (True, False):
            q, k, v = make_inputs(shapes.Shape(1, 1, 65, 16, causal), device=lesson.device())
            with np.errstate(all="ignore"):  # a wrong answer makes the interpreter warn of NaN
                out = answer(attention, q, k, v, causal, sm_scale)
            verdict = judge(out, q, k, v, causal=causal, sm_scale=sm_scale)
            assert verdict.ok, f"sm_scale = {sm_scale}, causal = {causal}: {verdict.reason}"


def check_signed(signed):
    """Scales of either sign, small and large, with a tail and with whole tiles."""
    for seqlen, sm_scale in ((65, 0.2), (65, -0.2), (128, -2.0), (17, -0.5)):
        for causal in (True, False):
            call = partial(signed, causal=causal, sm_scale=sm_scale)
            judge_kernel(call, shapes.Shape(1, 2, seqlen, 16, causal), causal=causal, sm_scale=sm_scale)
