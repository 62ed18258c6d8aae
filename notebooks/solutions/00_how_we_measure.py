"""Solutions of the exercises of chapter 00."""

import torch

from attnlib.bench.roofline import Hardware


def binding_roof(S: int, D: int, hw: Hardware) -> str:
    """The unit with the longest least time: HBM moves 8*S*D bytes, the rest is quadratic in S."""
    least = {
        "hbm": 8 * S * D / (hw.hbm_gbs * 1e9),
        "tensor": 4 * S * S * D / (hw.tensor_tflops_fp16 * 1e12),
        "exp": S * S / hw.exps_per_second,
    }
    return max(least, key=least.get)


def is_right(out: torch.Tensor, truth: torch.Tensor, tol: float) -> bool:
    """The shape first, because subtraction broadcasts; then a comparison that NaN makes false."""
    return out.shape == truth.shape and bool(((out - truth).abs() <= tol).all())


def visited_tiles(S: int, BLOCK_M: int, BLOCK_N: int) -> int:
    """A row tile visits the key tiles up to that of its last query."""
    total = 0
    for start in range(0, S, BLOCK_M):
        last = min(start + BLOCK_M, S) - 1
        total += last // BLOCK_N + 1
    return total
