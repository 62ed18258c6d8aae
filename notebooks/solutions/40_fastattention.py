"""Solutions of chapter 40."""

import math

import triton
import triton.language as tl


@triton.jit
def window_tile(p_ptr, out_ptr, row, key, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    M: tl.constexpr = BLOCK_M if BLOCK_M > BLOCK_N else BLOCK_N
    o_m, o_n = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]  # [BLOCK_M, 1], [1, BLOCK_N]
    above = tl.minimum(tl.maximum(row - key, -M), M)  # j <= i + above: not after the row
    below = tl.minimum(tl.maximum(row - key - window, -M), M)  # j <= i + below: too far before it
    first = tl.maximum(above, 0) * 2 * M + tl.maximum(-above, 0)
    other = tl.maximum(below, 0) * 2 * M + tl.maximum(-below, 0)
    b_seen = tl.load(p_ptr + first + o_m * 2 * M + o_n)  # [BLOCK_M, BLOCK_N]
    b_gone = tl.load(p_ptr + other + o_m * 2 * M + o_n)  # [BLOCK_M, BLOCK_N]
    tl.store(out_ptr + o_m * BLOCK_N + o_n, b_seen - b_gone)


def best_chunks(work, send, launch, latency, most):
    """Eight for the numbers of the text."""

    def finish(count):
        computed = sent = 0.0
        for _ in range(count):
            computed += work / count + launch
            sent = max(computed, sent) + send / count + latency
        return round(sent, 9)

    return min(range(1, most + 1), key=finish)


def crossover(bus, bus_us, cpu, cpu_us, token_bytes):
    """Where two lines cross; us for a byte are 1 / (1000 * GB/s)."""
    gain = token_bytes / 1e3 * (1 / bus - 1 / cpu)  # us a token
    if gain <= 0:
        return 1 if gain == 0 and cpu_us < bus_us else None
    return max(1, math.floor((cpu_us - bus_us) / gain) + 1)
