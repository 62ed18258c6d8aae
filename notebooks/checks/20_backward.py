"""Checks of the exercises of chapter 20."""

import numpy as np
import torch

from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels.reference.dense import attention_fp64


def check_query_blocks(answer):
    """Every block that is needed, none in vain, and a mask just where one is."""
    for rows, keys in ((256, 256), (100, 300), (300, 100), (1, 130), (129, 64), (64, 63)):
        seen = np.arange(keys)[None, :] <= np.arange(rows)[:, None] + keys - rows
        for block_m, block_n in ((64, 64), (32, 64), (64, 128), (48, 20)):
            for i_n in range(-(-keys // block_n)):
                case = f"key block {i_n}, {rows} queries, {keys} keys, tile {block_m} x {block_n}"
                _check_blocks(answer(i_n, rows, keys, block_m, block_n), seen, i_n, block_m, block_n, case)


def _check_blocks(got, seen, i_n, block_m, block_n, case):
    assert isinstance(got, tuple) and len(got) == 2, f"{case}: expected a pair of lists, got {got!r}"
    masked, full = (list(numbers) for numbers in got)
    both = sorted(masked + full)
    assert len(set(both)) == len(both), f"{case}: a block is visited twice: {both}"
    for m in range(-(-len(seen) // block_m)):
        tile = seen[m * block_m : (m + 1) * block_m, i_n * block_n : (i_n + 1) * block_n]
        assert tile.any() == (m in both), (
            f"{case}: query block {m} is {'not visited, but needed' if tile.any() else 'visited in vain'}"
        )
        if tile.any():
            assert tile.all() == (m in full), (
                f"{case}: query block {m} needs {'no mask' if tile.all() else 'a mask'}"
            )
    assert all(0 <= m < -(-len(seen) // block_m) for m in both), f"{case}: there is no such block in {both}"


def _forward(q, k, v, scale, cap):
    s = cap * np.tanh(scale * q @ k.T / cap)
    s = np.where(np.tri(len(q), len(k), dtype=bool), s, -np.inf)
    lse = np.log(np.exp(s - s.max(1, keepdims=True)).sum(1)) + s.max(1)
    return np.exp(s - lse[:, None]) @ v, lse


def check_softcap_backward(answer):
    """Against central differences along random directions, and number by number."""
    rng = np.random.default_rng(13)
    for size, scale, cap in ((24, 0.35, 2.0), (17, 1.0, 5.0), (9, 0.2, 50.0)):
        case = f"S = {size}, sm_scale = {scale}, cap = {cap}"
        q, k, v, d_out = rng.standard_normal((4, size, 8))
        out, lse = _forward(q, k, v, scale, cap)
        got = answer(d_out, q, k, v, out, lse, scale, cap)
        assert isinstance(got, tuple) and len(got) == 3, (
            f"{case}: expected (dq, dk, dv), got {type(got).__name__}"
        )
        for index, name in enumerate(("dq", "dk", "dv")):
            gradient = np.asarray(got[index])
            assert gradient.shape == (size, 8), (
                f"{case}: {name}: expected shape {(size, 8)}, got {gradient.shape}"
            )
            for _ in range(8):
                direction = rng.standard_normal((size, 8))
                ends = []
                for sign in (1e-5, -1e-5):
                    moved = [q, k, v]
                    moved[index] = moved[index] + sign * direction
                    ends.append((_forward(*moved, scale, cap)[0] * d_out).sum())
                want, have = (ends[0] - ends[1]) / 2e-5, (gradient * direction).sum()
                assert abs(want - have) < 1e-6 * max(1.0, abs(want)), (
                    f"{case}: {name} along a random direction: expected {want:.8f}, got {have:.8f}; "
                    "is the factor of the cap in dS, and the cap in P?"
                )


def check_grouped_dv(answer):
    """dV of heads that share K and V, against fp64: the sum over the group's heads, in fp32."""
    for heads, kv_heads, seqlen in ((1, 1, 64), (2, 2, 150), (4, 2, 100), (3, 1, 33)):
        case = f"H={heads} of {kv_heads}, S={seqlen}"
        q, k, v = make_inputs(Shape(2, heads, seqlen, 16, heads_kv=kv_heads))
        d_out = make_inputs(Shape(2, heads, seqlen, 16), seed=1)[0]
        lse = attention_fp64(q, k, v, causal=True)[1].float()
        dv = answer(d_out, q, k, lse, 0.25)
        assert isinstance(dv, torch.Tensor), f"{case}: expected a torch.Tensor, got {type(dv).__name__}"
        oracle = GradientOracle(d_out, q, k, v, causal=True)
        dq, dk = (oracle.truth[name].to(q.dtype) for name in ("dq", "dk"))
        verdict = oracle.judge(dq, dk, dv)["dv"]
        assert verdict.ok, f"{case}: {verdict.reason}"
