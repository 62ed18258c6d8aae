"""Checks of the exercises of chapter 08."""

import numpy as np

from attnlib.bench.shapes import Shape
from attnlib.book.exercises import judge_kernel


def check_late_attention(late_attention):
    """The right output, from calls in an order that leaves the product of a tile under the next softmax."""
    rng = np.random.default_rng(7)
    for tiles in (1, 2, 5):
        scores = [4 * rng.standard_normal((8, 16)) for _ in range(tiles)]
        values = [rng.standard_normal((16, 4)) for _ in range(tiles)]
        calls = []

        def score(j, scores=scores, calls=calls):
            calls.append(f"scores {j}")
            return scores[j]

        def product(p, j, values=values, calls=calls):
            calls.append(f"values {j}")
            return p @ values[j]

        got = late_attention(score, product, tiles)
        assert isinstance(got, np.ndarray), f"expected an array of shape (8, 4), got {type(got).__name__}"
        assert got.shape == (8, 4), f"expected an array of shape (8, 4), got {got.shape}"
        flat = np.concatenate(scores, 1)
        weights = np.exp(flat - flat.max(1, keepdims=True))
        want = weights @ np.concatenate(values) / weights.sum(1, keepdims=True)
        error = np.abs(got - want).max()
        assert error < 1e-12, f"{tiles} tiles: the output is off by up to {error:.1e}"
        late = [call for j in range(1, tiles) for call in (f"scores {j}", f"values {j - 1}")]
        order = ["scores 0", *late, f"values {tiles - 1}"]
        assert calls == order, f"{tiles} tiles: expected the calls {', '.join(order)}; got {', '.join(calls)}"


def check_shared_bytes_per_clock(shared_bytes_per_clock):
    """Bytes that a piece reads over the clocks that it takes, for several N, A in either place."""
    for block_n in (16, 32, 64, 128, 256):
        clocks = 2 * 64 * block_n * 16 / 4096
        for a_in_registers in (False, True):
            want = 2 * 16 * (block_n + (0 if a_in_registers else 64)) / clocks
            got = shared_bytes_per_clock(block_n, a_in_registers)
            place = "registers" if a_in_registers else "shared memory"
            assert isinstance(got, int | float), f"expected a number, got {type(got).__name__}"
            assert abs(got - want) < 1e-9, f"N = {block_n}, A in {place}: expected {want:g}, got {got:g}"


def check_cached_attention(cached_attention):
    """Few query heads and rows beside many keys, and shared heads, against fp64."""
    for heads, kv_heads, seqlen, keys in ((1, 1, 65, 65), (4, 2, 40, 40), (1, 1, 70, 203), (6, 2, 130, 150)):
        shape = Shape(2, heads, seqlen, 32, heads_kv=kv_heads, seqlen_k=keys)
        judge_kernel(cached_attention, shape, causal=True)
