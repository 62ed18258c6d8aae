"""Checks of the exercises of chapter 08."""

from attnlib.bench.shapes import Shape
from attnlib.book.exercises import judge_kernel


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
