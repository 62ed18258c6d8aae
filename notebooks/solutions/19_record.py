"""Solutions of chapter 19."""

import numpy as np


def lazy_attention(tiles, threshold):
    """Softmax-weighted values in base 2, and in how many (row, step) pairs the output was rescaled."""
    rows = tiles[0][0].shape[0]
    shift, total, o, count = np.full(rows, -np.inf), np.zeros(rows), 0.0, 0
    for scores, values in tiles:
        top = scores.max(1)
        empty = shift == -np.inf
        grown = top > shift + threshold  # not where both are -inf
        new = np.where(grown, top, shift)
        count += int((grown & ~empty).sum())
        safe = np.where(new == -np.inf, 0.0, new)
        alpha = np.exp2(shift - safe)  # 0 where nothing was seen yet
        p = np.exp2(scores - safe[:, None])
        total, o, shift = total * alpha + p.sum(1), o * alpha[:, None] + p @ values, new
    return o / total[:, None], count


def power_account(flops, ms, sm_mhz, watts, better=1.0, sms=132):
    """(share of the throttled roof, pJ per FLOP, TFLOP/s at `better` times that energy)."""
    tflops = flops / ms * 1e-9
    throttled = sms * 4096 * sm_mhz * 1e-6
    return tflops / throttled, watts / tflops, tflops / better


def violations(rows, peer, least, ours="attnlib"):
    """Cells where `ours` is slower than `least` times `peer`, worst first."""
    keys = ("batch", "heads", "seqlen", "head_dim", "causal", "dtype")
    ms = {(row["impl"], *(row[key] for key in keys)): row["ms"] for row in rows if row["status"] == "ok"}
    cells = []
    for (impl, *shape), mine in ms.items():
        theirs = ms.get((peer, *shape))
        if impl == ours and theirs is not None and theirs / mine < least:
            cells.append((theirs / mine, *shape[2:]))
    return sorted(cells)
