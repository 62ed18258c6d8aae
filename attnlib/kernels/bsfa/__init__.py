"""Block-Sparse FlashAttention (BSFA, arXiv 2512.07011): all scores are computed, and blocks whose largest one
is below a threshold are left out of the softmax. Two families: `hopper` in Gluon, `portable` in plain
Triton. What they agree on is in `kernels.common.bsfa`."""

from attnlib.kernels.bsfa import hopper, portable

__all__ = ["hopper", "portable"]
