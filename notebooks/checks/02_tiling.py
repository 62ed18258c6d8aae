"""Checks of the exercises of chapter 02. A check raises AssertionError with a hint and returns nothing."""

from collections.abc import Callable
from itertools import product

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _kv_bytes_by_counting(seqlen, head_dim, block_m, block_n, causal, k_passes, v_passes, itemsize) -> int:
    """Count the existing key rows of every tile of every row block, one at a time."""
    keys = 0
    for start_m in range(0, seqlen, block_m):
        end = min(seqlen, start_m + block_m) if causal else seqlen
        for start in range(0, end, block_n):
            keys += sum(key < seqlen for key in range(start, start + block_n))
    return keys * (k_passes + v_passes) * head_dim * itemsize


def check_kv_bytes(answer: Callable[..., int]) -> None:
    """`answer(seqlen, head_dim, block_m, block_n, causal, k_passes, v_passes, itemsize)` -> bytes."""
    for seqlen, block_m, block_n, causal in product(
        (1, 64, 200, 256), (64, 128), (32, 64, 128), (False, True)
    ):
        for head_dim, k_passes, v_passes, itemsize in ((64, 3, 1, 2), (128, 1, 1, 2), (64, 1, 2, 4)):
            args = (seqlen, head_dim, block_m, block_n, causal, k_passes, v_passes, itemsize)
            expected, got = _kv_bytes_by_counting(*args), answer(*args)
            what = (
                f"S={seqlen}, D={head_dim}, {block_m}x{block_n}, causal={causal}, {k_passes} passes over K, "
                f"{v_passes} over V, {itemsize} bytes an element"
            )
            assert got == expected, f"{what}: expected {expected} bytes, got {got}"
    expected = 4 * 4 * 256 * 64 * 2
    assert answer(256, 64, 64, 64, False) == expected, "keep the defaults: 3 passes over K, 1 over V, 2 bytes"


def check_row_sum(answer: Callable[..., torch.Tensor]) -> None:
    """`answer(q, k, m, sm_scale)` -> l [S] fp32 of one causal head."""
    generator = torch.Generator().manual_seed(3)
    for seqlen in (1, 32, 45, 96):
        q, k = (torch.randn(seqlen, 32, generator=generator) for _ in range(2))
        hidden = torch.ones(seqlen, seqlen, dtype=torch.bool).triu(1)
        scores = (q.double() @ k.double().T * 0.3).masked_fill(hidden, float("-inf"))
        m = scores.max(1).values
        expected = (scores - m[:, None]).exp().sum(1)
        got = answer(q.to(DEVICE), k.to(DEVICE), m.float().to(DEVICE), 0.3)
        assert got.shape == (seqlen,), f"expected shape ({seqlen},), got {tuple(got.shape)}"
        got = got.double().cpu()
        bad = (~((got - expected).abs() <= 1e-4 * expected)).nonzero().flatten().tolist()
        assert not bad, (
            f"S={seqlen}: {len(bad)} of {seqlen} rows are wrong, the first is row {bad[0]}: "
            f"expected {expected[bad[0]]:.4f}, got {got[bad[0]]:.4f}"
        )


def check_without_waits(answer: Callable[[dict], tuple[str, float]]) -> None:
    """`answer(row)` -> (key of the busiest unit, microseconds)."""
    units = ("tensor_pct", "xu_pct", "fma_pct", "alu_pct", "issue_pct", "shared_pct", "l2_pct", "dram_pct")
    shares = (28.0, 17.0, 20.0, 33.0, 55.0, 40.0, 31.0, 4.0)
    rows = [dict(zip(units, shares, strict=True)), dict.fromkeys(units, 10.0) | {"tensor_pct": 96.0}]
    rows.append(dict.fromkeys(units, None) | {"xu_pct": 62.0, "tensor_pct": 58.0})
    wanted = (("issue_pct", 1650.0), ("tensor_pct", 1920.0), ("xu_pct", 620.0))
    for row, time_us, expected in zip(rows, (3000.0, 2000.0, 1000.0), wanted, strict=True):
        row |= {"time_us": time_us, "occupancy_pct": 99.0, "l2_hit_pct": 98.0}
        got = answer(row)
        assert got is not None and len(got) == 2, "return two things: the key and the microseconds"
        assert got[0] == expected[0], f"expected {expected[0]!r}, got {got[0]!r} (hits are no unit)"
        assert abs(got[1] - expected[1]) < 1e-6 * expected[1], f"expected {expected[1]} µs, got {got[1]}"
