"""Solutions of the exercises of chapter 20."""

import numpy as np


def query_blocks(i_n, S_q, S_k, BLOCK_M, BLOCK_N):
    """(numbers of query blocks to visit with a mask, numbers of those to visit without)."""
    shift = S_k - S_q
    first_key, last_key = i_n * BLOCK_N, min(S_k, (i_n + 1) * BLOCK_N) - 1
    masked, full = [], []
    for m in range(-(-S_q // BLOCK_M)):
        first_row, last_row = m * BLOCK_M, min(S_q, (m + 1) * BLOCK_M) - 1
        if last_row + shift < first_key:
            continue
        (full if first_row + shift >= last_key else masked).append(m)
    return masked, full


def softcap_backward(d_out, q, k, v, out, lse, sm_scale, cap):
    """dq, dk, dv of causal attention whose scores are cap * tanh(scores / cap)."""
    bounded = np.tanh(sm_scale * q @ k.T / cap)  # the tile has it: the capped scores over the cap
    seen = np.tri(len(q), len(k), dtype=bool)
    p = np.where(seen, np.exp(np.where(seen, cap * bounded, -np.inf) - lse[:, None]), 0.0)
    delta = (d_out * out).sum(1, keepdims=True)
    ds = p * (d_out @ v.T - delta) * (1 - bounded**2)
    return sm_scale * ds @ k, sm_scale * ds.T @ q, p.T @ d_out
