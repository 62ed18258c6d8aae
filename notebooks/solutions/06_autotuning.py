"""Solutions of chapter 06."""

from attnlib.bench import shapes
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.book import lesson


def stages(block_m, block_n, head_dim, ctas):
    """The largest num_stages with which `ctas` CTAs of this tile fit one SM; 0 if none."""
    budget = 228 * 1024 // ctas - 1024  # at one CTA this is 227 KiB, just what one CTA may have
    q, k = 2 * block_m * head_dim, 2 * block_n * head_dim
    if q + k > budget:
        return 0
    return max(1, (budget - q) // (2 * k))


def wrong_configs(attention, configs):
    """Those of `configs` with which attention(q, k, v, causal, sm_scale, config) is wrong for some input."""
    wrong = []
    for kind in ("normal", "large"):  # large scores: only a running max keeps exp finite
        for seqlen in (1, 63, 128, 129):  # whole tiles, and tails on both sides of one
            q, k, v = make_inputs(shapes.Shape(1, 1, seqlen, 64), kind, device=lesson.device())
            oracle = Oracle(q, k, v, causal=True)
            for config in configs:
                # judge() compares with `not (error <= budget)`, which NaN fails
                if config not in wrong and not oracle.judge(attention(q, k, v, True, 64**-0.5, config)).ok:
                    wrong.append(config)
    return wrong
