"""Exact attention under a block mask: the cost of a call goes by the blocks that are seen.

Two families of kernels, `hopper` in Gluon and `portable` in plain Triton, as the registry wants them. The
lists that they walk along are those of `attnlib.block_mask.lists`, the bits of partial blocks those of
`attnlib.block_mask.tiles`.
"""

from attnlib.kernels.sparse import hopper, portable

__all__ = ["hopper", "portable"]
