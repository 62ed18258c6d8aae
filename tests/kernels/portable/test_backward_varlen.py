"""Gradients of varlen sequences: those of each sequence alone, and nothing of its neighbors."""

from __future__ import annotations

import math

import pytest
import torch
from backward_cases import exact_forward, portable_backward
from cases import INTERPRETER_REMARKS

from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.params import Params, Varlen, mask_window

pytestmark = INTERPRETER_REMARKS

# (queries, keys) of each sequence: none, one, just around a tile of 64 and the padding of 128, and unequal.
LENGTHS = {
    "equal": [(64, 64), (64, 64)],
    "mixed": [(1, 1), (0, 5), (129, 129), (17, 0), (63, 200), (0, 0), (65, 30)],
}


def varlen_of(lengths: list[tuple[int, int]], device: str) -> Varlen:
    sums = [[0, *torch.tensor(side).cumsum(0).tolist()] for side in zip(*lengths, strict=True)]
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in sums)
    return Varlen(cu_q, cu_k, max(q for q, _ in lengths), max(k for _, k in lengths))


def one(x: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """(T, H, D) -> (1, H, rows, D): a sequence alone."""
    return x[first:end].transpose(0, 1)[None]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(
    "causal, window, head_dim, dtype, poison",
    [
        (True, None, 64, torch.float16, False),
        (False, None, 40, torch.bfloat16, False),
        (True, (20, 0), 64, torch.float16, False),
        (False, (30, 10), 64, torch.float32, False),
        (True, None, 64, torch.float16, True),
        (False, None, 64, torch.float16, True),
    ],
)
def test_each_sequence_is_alone(lengths, causal, window, head_dim, dtype, poison, device: str) -> None:
    """`poison`: every second sequence is NaN throughout, and the others don't notice."""
    heads, kv_heads = 2, 1
    varlen = varlen_of(lengths, device)
    bounds, scale = mask_window(causal, window), head_dim**-0.5
    tokens = [sum(side) for side in zip(*lengths, strict=True)]
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    q, d_out = randn(tokens[0], heads, head_dim), randn(tokens[0], heads, head_dim)
    k, v = randn(tokens[1], kv_heads, head_dim), randn(tokens[1], kv_heads, head_dim)
    out, lse = torch.zeros_like(q), torch.full((heads, tokens[0]), -math.inf, device=device)
    spans = list(zip(varlen.cu_seqlens_q.tolist(), varlen.cu_seqlens_k.tolist(), strict=True))
    spans = [(*a, *b) for a, b in zip(spans[:-1], spans[1:], strict=True)]
    for number, (q0, k0, q1, k1) in enumerate(spans):
        if poison and number % 2:
            q[q0:q1], k[k0:k1], v[k0:k1], d_out[q0:q1] = (math.nan,) * 4
        b_out, b_lse = exact_forward(one(q, q0, q1), one(k, k0, k1), one(v, k0, k1), bounds, scale)
        out[q0:q1], lse[:, q0:q1] = b_out[0].transpose(0, 1), b_lse[0]
    dq, dk, dv = portable_backward(d_out, q, k, v, out, lse, Params(bounds, scale, varlen))
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    for number, (q0, k0, q1, k1) in enumerate(spans):
        if poison and number % 2:
            continue
        inputs = one(d_out, q0, q1), one(q, q0, q1), one(k, k0, k1), one(v, k0, k1)
        oracle = GradientOracle(*inputs, causal=causal, window=window)
        for verdict in oracle.judge(one(dq, q0, q1), one(dk, k0, k1), one(dv, k0, k1)).values():
            verdict.raise_if_bad(f"sequence {number}, {q1 - q0} queries, {k1 - k0} keys")


def test_padded_rows_do_not_overlap() -> None:
    """The first padded row of a sequence, whatever the lengths before it: `varlen_rows.padded_start`."""
    generator = torch.Generator().manual_seed(0)
    for i in range(200):
        padding = (32, 64, 128)[i % 3]
        lengths = torch.randint(0, 3 * padding, (int(torch.randint(1, 20, (), generator=generator)),))
        starts = [0, *lengths.cumsum(0).tolist()]
        padded = [(start // padding + b) * padding for b, start in enumerate(starts)]
        for length, first, then in zip(lengths.tolist(), padded[:-1], padded[1:], strict=True):
            assert first + -(-length // padding) * padding <= then
